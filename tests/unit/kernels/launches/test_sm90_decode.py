"""Workspace, grids and arguments of decode on Hopper, by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from bench.decode.own import over
from tests.launches import SmallCall, small_call
from warpattn.errors import AttentionError
from warpattn.kernels.sm90.decode.choice import choose, head_rows, queues_of
from warpattn.kernels.sm90.decode.config import Combine, LengthSums, with_fields
from warpattn.kernels.sm90.decode.launch import PROGRAMS, check_sums, features_of, list_launches, workspace
from warpattn.kernels.sm90.mla.config import choose as choose_latent
from warpattn.kernels.sm90.mla.launch import list_launches as mla_launches
from warpattn.masks import Full, Mask, Span
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Choice, Launch, PlanOptions
from warpattn.problem.operands import Operands
from warpattn.sequences import Dense, PagedKV, PagedRagged, Ragged

INVARIANT = PlanOptions(batch_invariant=True)


def chosen(call: SmallCall, **fields: Any) -> Choice:
    choice = choose(call.checked.problem, ARCHS["sm90"])
    return replace(choice, config=with_fields(choice.config, fields))


def launches(call: SmallCall, **fields: Any) -> tuple[Launch, ...]:
    return list_launches(*call, chosen(call, **fields))


@pytest.mark.parametrize(
    ("heads", "dim", "tokens", "grid"),
    [
        ((8, 2), 128, 1, (2, 4, 1)),  # 4 rows of queries; parts of many keep four warps busy
        ((66, 2), 128, 1, (2, 33, 1)),  # 33 rows
        ((2, 2), 64, 1, (2, 4, 1)),  # two rows of 64 columns a program, 8 are kept
        ((384, 96), 64, 16, (96, 2, 1)),  # 64 rows of few parts, 32 a program
        ((3072, 768), 64, 16, (768, 2, 1)),
        ((9216, 2304), 64, 16, (2304, 1, 1)),  # 2112 programs at most, but one for every head
    ],
)
def test_a_program_of_the_combining_kernel_for_its_rows(heads: tuple[int, int], dim: int, tokens: int, grid) -> None:
    call = small_call("sm90", (dim, dim), rows=(tokens, 600), heads=heads)
    _, combine = launches(call, combine=Combine(separate_kernel=True))
    assert (combine.name, combine.arch) == ("sm90.combine", "sm90")
    assert combine.grid == grid and combine.grid[0] * (combine.grid[1] - 1) < PROGRAMS


@pytest.mark.parametrize(
    ("heads", "tokens", "queues", "splits", "whole"),
    [
        ((8, 2), 4, 1, 64, 1),  # 16 rows; 128 CTAs for two heads
        ((64, 1), 4, 4, 32, 1),  # 256 rows, 4 tiles
        ((80, 1), 2, 3, 42, 1),  # 160 rows: two CTAs of 128 have nothing to do
        ((2048, 128), 8, 2, 1, 2),  # two tiles of 128 heads; 64 CTAs for each
    ],
)
def test_row_tiles_of_a_head_have_queues_of_their_own(heads, tokens: int, queues: int, splits: int, whole: int) -> None:
    """Ranges of all queues are the same ones, cut as if a head had one tile."""
    call = small_call("sm90", (128, 128), rows=(tokens, 600), heads=heads)
    attend = launches(call)[0]
    shape = attend.args["shape"]
    assert attend.persistent == queues and shape.tiles == queues
    assert (shape.splits, shape.whole) == (splits, whole)


@pytest.mark.parametrize(
    ("heads", "queues"), [(26, 2), (20, 20), (96, 32), (128, 128), (136, 8), (131, 1), (1024, 128)]
)
def test_nearly_every_cta_has_a_queue(heads: int, queues: int) -> None:
    """However many row tiles a head has; here one for each head, of 16 rows. Queues have equally many."""
    attend = launches(small_call("sm90", (512, 512), rows=(16, 600), heads=(heads, 1)))[0]
    assert attend.args["shape"].tiles == heads and heads % queues == 0
    assert attend.persistent == queues and attend.grid[0] % queues * 16 <= attend.grid[0]


@pytest.mark.parametrize("batch", [1, 3, 33, 129, 1025])
def test_queues_and_sums_of_every_grid(batch: int) -> None:
    """Whole row tiles and a CTA for each queue, few idle CTAs, and blocks that hold what is summed at once."""
    problem = replace(small_call("sm90", (512, 512), rows=(16, 600)).checked.problem, batch=batch, heads_kv=1)
    planned = choose(problem, ARCHS["sm90"])
    for tiles, grid in product(range(1, 41), range(1, 265)):
        asked = replace(problem, heads_q=tiles)  # 16 rows each
        queues = queues_of(asked, grid)
        assert 1 <= queues <= grid and tiles % queues == 0 and grid % queues * 16 <= grid
        sums = over(planned, asked, grid).config.schedule.sums
        row_tiles = batch * len(range(0, tiles, queues))
        assert (sums is None and tiles == 1) or sums.width >= row_tiles or not sums.once, (tiles, grid)
        check_sums(asked, sums, grid)


def test_a_grid_of_another_schedule_is_refused() -> None:
    """132 row tiles: in four queues of the 128 CTAs, in one of three CTAs."""
    call = small_call("sm90", (128, 128), rows=(16, 600), heads=(16, 1))
    problem = replace(call.checked.problem, batch=33)
    call = call._replace(checked=replace(call.checked, problem=problem))
    choice = choose(problem, ARCHS["sm90"])
    assert list_launches(*call, replace(choice, grid=(4,)))[0].args["shape"].queues == 4
    with pytest.raises(AttentionError, match="the grid is 3 CTAs, with 132 row tiles in a queue; the schedule sums at"):
        list_launches(*call, replace(choice, grid=(3,)))
    assert list_launches(*call, over(choice, problem, 3))[0].args["shape"].queues == 1


@pytest.mark.parametrize(("heads", "queues"), [(128, 2), (64, 1), (150, 1)])
def test_ragged_tokens_have_queues_of_whole_tiles(heads: int, queues: int) -> None:
    """Three tokens of 150 heads have 8 tiles of 64 rows."""
    x = torch.empty(1, dtype=torch.bfloat16)
    q, pages, ends = x.expand(6, heads, 128), x.expand(4, 16, 1, 128), torch.tensor([0, 3, 6]).int()
    sequence = PagedRagged(PagedKV(pages, pages, torch.zeros(2, 64).int(), ends[1:]), Ragged(ends, max_q=3))
    problem = validate(Call(q, pages, pages, sequence, backend="simulate:sm90"), read_values=False).problem
    assert queues_of(problem, 128) == queues


@pytest.mark.parametrize(
    ("batch", "tokens", "tiles", "sums"),
    [
        (128, 1, 1, LengthSums(128, 4)),
        (129, 1, 1, LengthSums(1024)),
        (1025, 1, 1, LengthSums(1024, once=False)),
        (1024, 4, 2, LengthSums(1024)),  # in each of two queues
    ],
)
def test_units_are_summed_at_once_where_they_fit(batch: int, tokens: int, tiles: int, sums: LengthSums) -> None:
    """32 rows of queries a token, 64 a tile."""
    x = torch.empty(1, dtype=torch.bfloat16)
    q, pages = x.expand(batch, tokens, 32, 128), x.expand(4, 16, 1, 128)
    kv = PagedKV(pages, pages, torch.zeros(batch, 64).int(), torch.zeros(batch).int())
    problem = validate(Call(q, pages, pages, kv, backend="simulate:sm90"), read_values=False).problem
    schedule = choose(problem, ARCHS["sm90"]).config.schedule
    assert schedule.sums == sums and schedule.one_row_tile == (tiles == 1)


class Longer(Full):
    """Later sequences see more keys."""

    def kv_span(self, b: Any, h: Any, q_lo: Any, q_hi: Any, lens: Any) -> Span:
        return Span(0, 0, 100 * (b + 1), 100 * (b + 1))


@pytest.mark.parametrize(("tokens", "mask", "same"), [(1, Full(), True), (4, Full(), False), (1, Longer(), False)])
def test_dense_heads_are_equally_long_where_nothing_tells_them_apart(tokens: int, mask: Mask, same: bool) -> None:
    q, k = (torch.empty(1, dtype=torch.bfloat16).expand(3, n, h, 128) for n, h in ((tokens, 32), (640, 1)))
    problem = validate(Call(q, k, k, Dense(), mask, backend="simulate:sm90")).problem
    assert (choose(problem, ARCHS["sm90"]).config.schedule.sums is None) == same


def test_tokens_of_latent_queries_need_no_kernel_of_their_own() -> None:
    """The number of queues is an argument, so an engine that is warm for two tokens is for any more."""
    keys = set()
    for tokens in (2, 3, 5, 8):
        q, k = torch.empty(3, tokens, 128, 576).bfloat16(), torch.empty(3, 600, 1, 576).bfloat16()
        x = Operands(q, k, k[..., :512], q[..., :512], None, None)
        ready = validate(Call(*x[:3], Dense(), backend="simulate:sm90"))
        choice = choose_latent(ready.problem, ARCHS["sm90"])
        keys |= {launch.key for launch in mla_launches(ready, x, Dense(), choice) if launch.name == "sm90.mla"}
    assert len(keys) == 1


def test_columns_of_the_combining_kernel() -> None:
    """A program of latent attention has 128 of 512; others have all, with padding."""
    narrow = small_call("sm90", (40, 40), rows=(1, 600), heads=(8, 2))
    assert launches(narrow, combine=Combine(separate_kernel=True))[1].grid[2] == 1
    assert len(launches(narrow, combine=Combine(separate_kernel=False))) == 1
    q, k = torch.empty(1, 16, 256, 576).bfloat16(), torch.empty(1, 600, 1, 576).bfloat16()
    x = Operands(q, k, k[..., :512], q[..., :512], None, None)
    latent = validate(Call(*x[:3], Dense(), backend="simulate:sm90"))
    _, combine = mla_launches(latent, x, Dense(), choose_latent(latent.problem, ARCHS["sm90"]))
    heads = 16 * 256 // 64
    assert combine.grid == (heads, 64 // 16, 4)


def test_rows_of_the_workspace() -> None:
    """64 at most, and as many as swap-AB keeps."""
    few, many = (small_call("sm90", (128, 128), rows=(n, 600), heads=(30, 2)) for n in (1, 16))
    assert [head_rows(call.checked.problem) for call in (few, many)] == [15, 64]
    for call in (few, many):
        config = chosen(call).config
        expected = config.kept_rows if config.swap_ab else 64
        assert launches(call)[0].args["workspace"].rows == expected
    assert chosen(few).config.kept_rows == 16


def test_slots_of_the_workspace() -> None:
    """Two a CTA; batch-invariant one a part of a head, and one that nobody writes where heads are in one piece."""
    call = small_call("sm90", (128, 128), rows=(1, 600), heads=(8, 2))
    device = torch.device("cpu")
    kept = workspace(call.checked.problem, replace(chosen(call), grid=(7,)), 4, device)
    assert kept.o.shape == (14, 4, 128) and kept.denominators.shape == (14, 4)
    assert kept.tickets.tolist() == [0, 0] and kept.heads.shape == (2, 2)
    assert kept.tickets.dtype == kept.heads.dtype == torch.int32

    def slots(keys: int) -> int:
        problem = replace(call.checked.problem, seq_k=keys)
        return len(workspace(problem, choose(problem, ARCHS["sm90"], options=INVARIANT), 4, device).denominators)

    assert [slots(keys) for keys in (2048, 2049, 4096, 4097)] == [1, 4, 4, 6]


def test_each_head_has_a_ticket_and_two_parts_of_its_own() -> None:
    call = small_call("sm90", (64, 64), rows=(1, 600), heads=(12, 3))
    args = launches(call)[0].args
    assert args["workspace"].tickets.shape == (3,) and args["workspace"].heads.shape == (3, 2)
    assert (args["shape"].heads, args["shape"].group) == (3, 4)


def test_tickets_begin_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not initialised holds anything."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, 7, **options))
    call = small_call("sm90", (128, 128), rows=(1, 600), heads=(8, 2))
    assert launches(call)[0].args["workspace"].tickets.tolist() == [0, 0]


def test_registers_of_two_blocks_an_sm_are_limited() -> None:
    call = small_call("sm90", (64, 64), kind="paged", page=16, rows=(1, 256))
    config = chosen(call).config
    assert config.ctas == 2 and launches(call)[0].options["maxnreg"] == config.max_registers
    assert launches(call, ctas=1)[0].options.get("maxnreg") is None


@pytest.mark.parametrize(("sinks", "lse"), [(True, False), (False, True)])
def test_kernels_are_compiled_for_sinks_and_lse(sinks: bool, lse: bool) -> None:
    q, k = torch.zeros(1, 1, 8, 64).bfloat16(), torch.zeros(1, 600, 2, 64).bfloat16()
    given = torch.zeros(8) if sinks else None
    features = features_of(validate(Call(q, k, k, Dense(), None, None, given, None, lse, backend="simulate:sm90")))
    assert (features.has_sinks, features.has_lse) == (sinks, lse)


def test_lengths_and_tables_are_read_row_by_row() -> None:
    """Tables with rows of any stride are read where they are; a table or lengths of other strides are copied."""
    q, pages = torch.zeros(2, 1, 8, 64).bfloat16(), torch.zeros(8, 16, 2, 64).bfloat16()
    wide, lengths = torch.arange(80, dtype=torch.int32).view(2, 40)[:, 3:20], torch.tensor([0, 9, 1, 9]).int()[::2]

    def keys(table: torch.Tensor) -> Any:
        sequence = PagedKV(pages, pages, table, lengths)
        checked = validate(Call(q, pages, pages, sequence, backend="simulate:sm90"), read_values=False)
        call = SmallCall(checked, Operands(q, pages, pages, q, None, None), sequence)
        return launches(call)[0].args["keys"]

    assert keys(wide).table is wide and keys(wide).table_stride == 40
    turned = keys(wide[:, :2].T)
    assert turned.table.stride() == (2, 1) and turned.table_stride == 2
    assert turned.lengths.stride() == (1,) and turned.lengths.tolist() == [0, 1]


@pytest.mark.parametrize(("page", "table"), [(16, "MappedRows"), (3, "StridedRows")])
def test_pages_are_read_by_tma_or_row_by_row(page: int, table: str) -> None:
    """Pages, not sequences, bound what TMA reads."""
    call = small_call("sm90", (64, 64), kind="paged", page=page, rows=(1, 256), heads=(8, 2))
    args = launches(call)[0].args
    shape = args["shape"]
    assert (shape.batch, shape.pages, shape.page_size) == (1, 256 // page + 1, page)
    assert type(args["k"]).__name__ == type(args["v"]).__name__ == table


def test_dense_keys_have_pages_of_no_size() -> None:
    q, k = torch.zeros(3, 1, 8, 64).bfloat16(), torch.zeros(3, 600, 2, 64).bfloat16()
    checked = validate(Call(q, k, k, Dense(), backend="simulate:sm90"))
    call = SmallCall(checked, Operands(q, k, k, q, None, None), Dense())
    shape = launches(call)[0].args["shape"]
    assert (shape.pages, shape.page_size, shape.total) == (3, 1, 3)


def test_queries_end_to_end_are_counted_by_their_offsets() -> None:
    """Seven rows of three sequences."""
    kv = PagedKV(*[torch.zeros(8, 16, 2, 64).bfloat16()] * 2, *(torch.zeros(s).int() for s in ((3, 2), (3,))))
    offsets = torch.tensor([0, 9, 4, 9, 5, 9, 7, 9], dtype=torch.int32)[::2]
    sequence, q = PagedRagged(kv, Ragged(offsets, max_q=4)), torch.zeros(7, 8, 64).bfloat16()
    checked = validate(Call(q, kv.k_pages, kv.v_pages, sequence, backend="simulate:sm90"), read_values=False)
    call = SmallCall(checked, Operands(q, kv.k_pages, kv.v_pages, q, None, None), sequence)
    args = launches(call)[0].args
    assert args["keys"].cu_q.tolist() == [0, 4, 5, 7] and args["keys"].cu_q.is_contiguous()
    assert args["shape"].total == 7


def test_each_tensor_of_8_bits_has_its_own_scale() -> None:
    k = torch.zeros(1, 600, 2, 64).to(torch.float8_e4m3fn)
    q = torch.zeros(1, 1, 8, 64).to(torch.float8_e4m3fn)
    sequence = Dense(*(torch.full((heads,), float(heads)) for heads in (2, 2, 8)))
    out = torch.zeros(1, 1, 8, 64).bfloat16()
    checked = validate(Call(q, k, k, sequence, backend="simulate:sm90"), read_values=False)
    call = SmallCall(checked, Operands(q, k, k, out, None, None), sequence)
    args = launches(call)[0].args
    assert args["k"].scale is sequence.k_scale and args["v"].scale is sequence.v_scale
    assert args["q"].scale.scale is sequence.q_scale
