"""Which configuration a prefill on Hopper gets: packed heads, split keys, half tiles, and the usual one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.cases import Case, groups
from bench.choices import checked, empty, read_records
from bench.rates import SLOWEST, speed_of
from tests.unit.kernels.sm90_builds import chosen
from warpattn.kernels.pieces.span_tiles import TileSize, span_tiles
from warpattn.kernels.sm90.candidates import candidates
from warpattn.kernels.sm90.prefill.choice import choose, measured_row, tiling
from warpattn.kernels.sm90.prefill.config import SMEM_LIMIT, TileShape, choose_config, with_tile
from warpattn.kernels.sm90.prefill.rates import COMMAND, RECORDS
from warpattn.kernels.sm90.prefill_varlen.config import choose as choose_varlen
from warpattn.kernels.sm90.softmax_steps import weights_first
from warpattn.masks import Causal, Chunked, Document, Full, Mask, Padding, SlidingWindow
from warpattn.problem import Call, Problem, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import PlanOptions
from warpattn.problem.operands import is_masked
from warpattn.sequences import Dense, PagedKV, PagedRagged, Ragged

ROOT = Path(__file__).parents[3]
TRIED = read_records([ROOT / record for record in RECORDS])
SLOWER = {
    "44x504/504 32/8 D64/64 full": "0.917: the estimate of its tile is 20 % too low",
    "25x54/1063 12/12 D72/72 window1024": "0.871: half tiles are estimated 18 % too slow",
    "16x111/111 28/4 D80/80 causal": "0.833: half tiles of 7 heads are estimated 14 % too slow",
}
FASTER = {"d64-16x1k-full": TileShape(4, 64)}  # 303 us; 320 with the usual tile (bench/notes.md 272)
MEASURED = [case for name, cases in groups().items() if name not in ("smoke", "wide") for case in cases]


def problem_of(seq_q: int, seq_k: int, mask: Mask) -> Problem:
    return problem_at(1, seq_q, seq_k, 2, 2, 64, mask)


def problem_at(batch: int, seq_q: int, seq_k: int, heads: int, heads_kv: int, dim: int, mask: Mask) -> Problem:
    one = torch.empty(1, dtype=torch.bfloat16)
    q, k = one.expand(batch, seq_q, heads, dim), one.expand(batch, seq_k, heads_kv, dim)
    return validate(Call(q, k, k, Dense(), mask, backend="simulate:sm90")).problem


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_shapes_on_record_keep_their_configuration(case) -> None:
    mask = Full() if not case.causal else Causal() if not case.window else Causal() & SlidingWindow(case.window)
    choice = chosen(case.batch, case.seq_q, case.seq_k, case.heads_q, case.heads_kv, case.dim, mask)
    problem = problem_of(case.seq_q, case.seq_k, mask)
    usual, _ = choose_config(problem.element, case.dim, case.dim_v, case.seq_q, is_masked(problem))
    expected = with_tile(usual, FASTER[case.name]) if case.name in FASTER else usual
    assert choice.config == expected and choice.partitions == 1


@pytest.mark.parametrize(
    ("shape", "mask", "packed", "parts", "word"),
    [
        ((4, 8192, 8192, 64, 8, 64), Causal() & SlidingWindow(128), 8, 1, "8 query heads"),
        ((32, 32, 4096, 32, 8, 128), Causal(), 4, 1, "4 query heads"),
        ((2, 8192, 8192, 16, 16, 64), Causal() & SlidingWindow(128), 1, 1, "two of which fit on an SM"),
        ((2, 22436, 22436, 32, 4, 128), Causal() & SlidingWindow(128), 8, 1, "8 query heads"),
        ((3, 8960, 8960, 28, 4, 72), Causal() & SlidingWindow(128), 7, 1, "7 query heads"),
        ((32, 200, 7679, 24, 8, 64), Full(), 3, 1, "3 query heads"),  # 640 rows in tiles of 128, alone 768
        ((9, 407, 407, 40, 8, 256), Causal(), 5, 1, "5 query heads"),
        ((7, 1472, 1472, 28, 4, 32), Full(), 1, 1, "tiles of more rows"),
        ((4, 4096, 4096, 16, 16, 80), Full(), 1, 1, "head dim <= 128"),
        ((4, 4096, 4096, 16, 16, 96), Causal(), 1, 1, "head dim <= 128"),
        ((1, 256, 32768, 32, 8, 128), Causal(), 1, 2, "64 tiles on 132 SMs"),
        ((1, 64, 32768, 32, 8, 128), Causal(), 4, 8, "16 tiles on 132 SMs"),
        ((1, 300, 32768, 2, 1, 256), Full(), 2, 26, "shared out over 26 CTAs"),
        ((1, 1024, 16384, 32, 8, 128), Causal(), 1, 1, "head dim <= 128"),
        ((1, 512, 512, 32, 8, 128), Causal(), 1, 1, "64-row tiles"),
        ((1, 70, 100, 2, 2, 64), Full(), 1, 1, "64-row tiles"),
        ((64, 256, 256, 16, 16, 64), Full(), 1, 1, "tiles of more rows"),
        ((1, 15386, 15386, 8, 8, 128), Full(), 1, 1, "fewer waves"),
        ((4, 8654, 8654, 8, 1, 64), Full(), 8, 1, "8 query heads"),  # 11 waves of equal tiles; one head: 12
        ((38, 37, 155, 12, 12, 96), Full(), 1, 1, "64-row tiles"),
        ((2, 8192, 8192, 32, 32, 64), Causal() & Document(torch.zeros(8192).int()), 1, 1, "reads tensors"),
    ],
)
def test_what_a_shape_gets_and_why(shape, mask: Mask, packed: int, parts: int, word: str) -> None:
    choice = chosen(*shape, mask)
    config = choice.config
    assert (config.packed, choice.partitions) == (packed, parts)
    assert config.split == (parts > 1) and shape[3] // shape[4] % packed == 0
    assert word in choice.reasons[0]
    assert config.smem_bytes + 512 <= (SMEM_LIMIT + 1024) // config.ctas - 1024 * (config.ctas > 1)
    assert config.topology.registers * config.ctas <= 65_536
    assert config.store_parts == config.v_parts or config.padded_v % config.store_parts[0] == 0
    assert choice.grid[0] <= 132 * config.ctas


@pytest.mark.parametrize(
    ("shape", "mask", "ctas"),
    [
        ((1, 1024, 1024, 16, 16, 128), Causal(), 1),  # 256 tiles, the longest 16 times as long as the shortest
        ((2, 376, 376, 28, 4, 128), Causal() & SlidingWindow(128), 2),  # 336
        ((1, 1024, 1024, 16, 16, 128), Causal() & SlidingWindow(128), 2),  # 256, all but two of a head equally long
        ((1, 512, 512, 32, 8, 128), Causal(), 1),  # 256, the longest eight times as long as the shortest
        ((2, 553, 553, 28, 4, 64), Causal(), 2),  # 504
        ((2, 261, 261, 28, 4, 128), Full(), 2),  # 280, equally long
        ((16, 128, 128, 7, 7, 64), Full(), 2),  # 224, equally long
        ((1, 128, 128, 12, 12, 64), Full(), 1),  # 24
    ],
)
def test_an_sm_has_two_ctas_at_once_unless_that_makes_long_tiles_longer(shape, mask: Mask, ctas: int) -> None:
    batch, rows, _, heads, *_ = shape
    choice = next(c for c in candidates(problem_at(*shape, mask), ARCHS["sm90"]).values() if c.config.ctas == 2)
    assert choice.config.packed == 1 and choice.grid == (min(batch * heads * -(-rows // 64), 132 * ctas),)
    words = next(reason for reason in choice.reasons if "persistent" in reason)
    assert ("one of 2 persistent CTAs" in words) == (ctas == 2)


@pytest.mark.parametrize(
    "tried",
    [
        pytest.param(case, id=name, marks=pytest.mark.xfail(strict=True, reason=SLOWER[name]) if name in SLOWER else ())
        for record in TRIED
        for case in record["cases"]
        for name in (case["case"]["name"],)
    ],
)
def test_the_choice_is_nearly_as_fast_as_the_best_of_all_that_were_measured(tried) -> None:
    speed = speed_of(tried)
    assert speed is not None and speed >= SLOWEST


@pytest.mark.parametrize("lengths_on_device", [False, True])
@pytest.mark.parametrize("shape", [(4, 8192, 64, 8, 64), (1, 512, 32, 8, 128), (40, 37, 8, 8, 96), (2, 900, 8, 2, 320)])
def test_a_plan_names_the_measured_row_of_its_tile(shape, lengths_on_device: bool) -> None:
    batch, length, heads, heads_kv, dim = shape
    choice = chosen(batch, length, length, heads, heads_kv, dim, Causal())
    if lengths_on_device:
        choice = choose_varlen(ragged(Causal(), length, batch, dim, None), ARCHS["sm90"])
    config = choice.config.tiles if lengths_on_device else choice.config
    _, tile, rate = measured_row(tiling(config).wide, config.tile_shape)
    (row,) = (reason for reason in choice.reasons if COMMAND in reason)
    assert f"the row {64 * tile.consumers} x {tile.keys}" in row
    assert sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(row.split("`, ")[1])) == sorted(RECORDS)
    assert f"{rate.row:g} ns a row, {rate.key:g} a key of it, {rate.masked:g} more" in row
    assert ("nearest" in row) == (dim == 320)


@pytest.mark.parametrize("record", RECORDS)
def test_the_records_of_the_rates_are_those_of_the_command(record: str) -> None:
    assert json.loads((ROOT / record).read_text())["command"].startswith(COMMAND)


def test_every_shape_has_one_entry() -> None:
    names = [entry["case"]["name"] for record in TRIED for entry in record["cases"]]
    assert len(names) == len(set(names)) == 159


def ragged(mask: Mask, lengths: int, batch: int, dim: int, max_q: int | None) -> Problem:
    q, k = (torch.empty(1, dtype=torch.bfloat16).expand(batch * lengths, heads, dim) for heads in (8, 2))
    cu = torch.arange(batch + 1, dtype=torch.int32) * lengths
    return validate(Call(q, k, k, Ragged(cu, max_q=max_q), mask, backend="simulate:sm90")).problem


@pytest.mark.parametrize(
    ("mask", "dim", "lengths", "batch", "packed", "keys", "parts"),
    [
        (Causal() & SlidingWindow(128), 64, 8192, 4, 4, 32, 1),
        (Causal() & SlidingWindow(50), 64, 300, 9, 4, 32, 1),
        (Causal() & SlidingWindow(1024), 64, 8192, 4, 4, 128, 1),
        (Causal() & SlidingWindow(128), 128, 8192, 4, 4, 32, 1),
        (Causal(), 64, 8192, 2, 4, 128, 1),
        (Causal(), 128, 2048, 2, 4, 128, 1),
        (Causal(), 128, 1300, 2, 4, 128, 1),
        (Causal() & Document(torch.zeros(4096).int()), 128, 2048, 2, 1, 128, 1),
        (Full(), 64, 8192, 2, 1, 128, 1),
        (Causal(), 128, 40, 50, 4, 128, 1),
        (Full(), 128, 2048, 1, 1, 128, 1),
    ],
)
def test_what_lengths_on_the_device_get(mask: Mask, dim, lengths, batch, packed, keys, parts) -> None:
    choice = choose_varlen(ragged(mask, lengths, batch, dim, None), ARCHS["sm90"])
    tiles = choice.config.tiles
    assert (tiles.packed, tiles.block_n, choice.partitions) == (packed, keys, parts)
    assert choice.config.topology.smem_bytes + 512 <= SMEM_LIMIT


def test_tiles_of_all_heads_were_hardly_slower_under_a_mask() -> None:
    """What the plan takes for granted where lengths are on the device: the same tile and rings, one head or all. It
    weighs tiles whose heads do not fill their rows."""
    shares = {}
    for tried in (case for record in TRIED for case in record["cases"]):
        case, times = Case(**tried["case"]), dict(tried["microseconds"])
        times[tried["chosen"]] = times.pop("chosen")
        problem = checked(case, empty(case)).problem
        if not is_masked(problem) or case.heads_q == case.heads_kv or 64 % (case.heads_q // case.heads_kv):
            continue
        usual, _ = choose_config(problem.element, case.dim, case.dim_v, case.seq_q, True)
        start = f"{usual.block_m}x{usual.block_n} "
        alone = [name for name in times if name.startswith(start) and name.endswith(" heads1 parts1")]
        for name in alone:
            every = name.replace("heads1 ", f"heads{case.heads_q // case.heads_kv} ")
            shares |= {(case.name, name): times[every] / times[name]} if every in times else {}
    assert len(shares) == 45 and max(shares.values()) < 1.036
    assert sum(share < 0.76 for share in shares.values()) == 13 and sum(share > 1.002 for share in shares.values()) == 9



@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("tokens", [32, 128, 600, 2048, 4096, 8192])
def test_prompts_over_many_keys_have_two_tiles(tokens: int, page_size: int) -> None:
    """Whatever their lengths, all heads of a key head are in a tile: few kernels serve an engine's steps."""
    pages = torch.empty(1, dtype=torch.bfloat16).expand(2048, 16, 8, 64)
    q, cu = pages.new_empty(1).expand(tokens, 64, 64), torch.tensor([0, tokens], dtype=torch.int32)
    if page_size:
        kv = PagedKV(pages, pages, torch.zeros(1, 2048, dtype=torch.int32), torch.full((1,), 32768, dtype=torch.int32))
        call = Call(q, pages, pages, PagedRagged(kv, Ragged(cu)), Causal())
    else:
        k = pages.new_empty(1).expand(32768, 8, 64)
        call = Call(q, k, k, Ragged(cu, torch.tensor([0, 32768], dtype=torch.int32)), Causal())
    tiles = choose_varlen(validate(replace(call, backend="simulate:sm90")).problem, ARCHS["sm90"]).config.tiles
    assert (tiles.packed, tiles.block_n, tiles.consumers) == (8, 128, 2 if tokens <= 2048 else 3)


@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(100)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("dim", [32, 64, 72, 80, 96, 112, 128, 144, 152, 160, 192, 224, 256])
def test_an_invariant_batch_has_the_same_sums_whatever_its_lengths(dim: int, mask: Mask) -> None:
    """What the bits of a row depend on: the keys of a tile, and which of its weights move the reference (with it all
    weights change). Which rows share a tile changes no bit."""
    shapes = [(8192, 4, None), (40, 50, None), (300, 1, 300), (64, 2, 4096), (2049, 1, None), (700, 3, None)]
    problems = [ragged(mask, lengths, batch, dim, max_q) for lengths, batch, max_q in shapes]
    choices = [choose_varlen(problem, ARCHS["sm90"], PlanOptions(batch_invariant=True)) for problem in problems]
    tiles = [choice.config.tiles for choice in choices]
    assert len({(tile.block_n, weights_first(tile, None), tile.overlaps) for tile in tiles}) == 1
    assert {choice.partitions for choice in choices} == {1}


def test_keys_of_pages_are_shared_out_over_idle_processors() -> None:
    element = torch.empty(1, dtype=torch.bfloat16)
    pages = element.expand(2048, 16, 8, 128)
    for invariant, batch in ((False, 1), (True, 1), (True, 9)):
        table, lengths = torch.zeros(batch, 2048, dtype=torch.int32), torch.full((batch,), 32768, dtype=torch.int32)
        call = Call(element.expand(batch, 256, 32, 128), pages, pages, PagedKV(pages, pages, table, lengths), Causal())
        problem = validate(replace(call, backend="simulate:sm90")).problem
        assert choose_varlen(problem, ARCHS["sm90"], PlanOptions(batch_invariant=invariant)).partitions == 2


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_an_invariant_batch_has_the_parts_of_a_sequence_alone(batch: int) -> None:
    choice = chosen(batch, 256, 32768, 32, 8, 128, Causal(), invariant=True)
    assert choice.partitions == 2
    assert choice.config == chosen(1, 256, 32768, 32, 8, 128, Causal(), invariant=True).config


@pytest.mark.parametrize("mask", [Full(), Causal(), Causal() & SlidingWindow(50), Chunked(40) & Causal()])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(200, 200), (70, 330), (300, 100)])
def test_counted_key_tiles_are_those_with_something_to_see(mask: Mask, seq_q: int, seq_k: int) -> None:
    sizes = [TileSize(tokens, block_n) for tokens in (24, 64) for block_n in (32, 48)]
    found = span_tiles(problem_of(seq_q, seq_k, mask), sizes)
    assert list(found) == sizes
    q, k = torch.arange(seq_q)[:, None] + seq_k - seq_q, torch.arange(seq_k)[None]
    seen = mask.keep(0, 0, q, k) & (k >= 0) & (q == q) if not isinstance(mask, Full) else (k >= 0) & (q == q)
    for (tokens, block_n), tiles in found.items():
        for index, row in enumerate(range(0, seq_q, tokens)):
            rows = seen[row : row + tokens]
            visible = rows.any(0).nonzero().flatten()
            count = 1 if len(visible) == 0 else int(visible[-1] // block_n - visible[0] // block_n) + 1
            whole = sum(bool(rows[:, n : n + block_n].all()) for n in range(0, seq_k - block_n + 1, block_n))
            assert tiles.total[index] == count
            assert count - whole <= tiles.masked[index] <= count


def test_nothing_is_counted_where_a_tensor_decides() -> None:
    assert span_tiles(problem_of(100, 100, Padding(torch.tensor([50]))), [TileSize(64, 64)]) == {}


@pytest.mark.parametrize(("window", "tried"), [(500, True), (1100, True), (1200, False)])
def test_short_key_tiles_are_tried_where_rows_see_few_keys(window: int, tried: bool) -> None:
    """Tiles of 192 rows, whose keys are up to 1024 of a row, half a tile more and a begun tile at both ends: 1408."""
    problem = problem_of(8192, 8192, Causal() & SlidingWindow(window, 0))
    assert any("x32 " in name for name in candidates(problem, ARCHS["sm90"])) == tried


@pytest.mark.parametrize(
    ("seq", "dim", "mask", "consumers"),
    [(8192, 64, Causal(), 3), (4096, 64, Causal(), 2), (16384, 64, SlidingWindow(1024), 2), (4096, 64, Full(), 3),
     (1024, 64, Full(), 2), (16384, 128, Causal(), 2)],
)  # fmt: skip
def test_products_have_three_warpgroups_where_they_pay(seq: int, dim: int, mask: Mask, consumers: int) -> None:
    x = torch.empty(1, dtype=torch.float8_e4m3fn).expand(2, seq, 8, dim)
    sequence = Dense(*[torch.ones(())] * 3)
    problem = validate(Call(x, x, x, sequence, mask, backend="simulate:sm90"), read_values=False).problem
    assert choose(problem, ARCHS["sm90"]).config.consumers == consumers
