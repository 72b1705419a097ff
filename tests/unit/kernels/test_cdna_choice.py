"""What a problem gets on gfx942 and gfx950, by hand."""

from dataclasses import replace

import pytest
import torch

from warpattn.kernels.cdna.select import choose, decode_config, prefill_config
from warpattn.problem import Call, Problem, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.element import BF16
from warpattn.problem.problem import Scales
from warpattn.sequences import Dense


def problem(**changes: object) -> Problem:
    q, k = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16), torch.empty(1, 9, 1, 64, dtype=torch.bfloat16)
    return replace(validate(Call(q, k, k, Dense(), backend="reference")).problem, **changes)


# Key heads, keys, partitions, a word of the reason; 256 CUs. A count is rounded up to 1, 2, 4, 8, 16, 32, 48 or 64.
PARTITIONS = [
    (1, 256, 1, "one unit"),
    (1, 257, 2, "256 keys or more"),  # two units
    (1, 1_000_000, 64, "256 keys or more"),  # the most that the kernels take
    (16, 20_736, 32, "256 keys or more"),  # 81 units, a part for each five: 17
    (100, 10_000, 8, "256 keys or more"),  # 40 units, two workgroups a CU at most: 6
    (100, 20_000, 8, "256 keys or more"),  # 79 units would be 16 parts: the same 6
    (255, 8192, 4, "256 keys or more"),  # two workgroups of 256 CUs for 255 heads: 4
    (256, 8192, 8, "parts stay long"),  # of 256 * 4 keys
    (300, 2100, 4, "parts stay long"),  # 2.05 parts of 256 * 4 keys
]


@pytest.mark.parametrize(("heads", "keys", "parts", "word"), PARTITIONS)
def test_partitions(heads: int, keys: int, parts: int, word: str) -> None:
    choice = choose(problem(heads_q=heads, heads_kv=heads, seq_k=keys), ARCHS["gfx950"])
    assert choice.partitions == choice.grid[1] == parts
    assert sum(word in reason for reason in choice.reasons) == 1


@pytest.mark.parametrize(
    ("kind", "tokens", "invariant", "kernel"),
    [
        ("dense", 16, False, "decode"), ("dense", 17, False, "prefill"), ("dense", 16, True, "decode"),
        ("ragged", 1, False, "prefill"), ("paged-ragged", 1, False, "decode"), ("paged-ragged", 1, True, "prefill"),
    ],
)  # fmt: skip
def test_few_queries_are_decode(kind: str, tokens: int, invariant: bool, kernel: str) -> None:
    """But not where the number of queries of the next step may differ and results must not."""
    few = problem(kind=kind, seq_q=tokens, seq_k=4000)
    assert choose(few, ARCHS["gfx950"], batch_invariant=invariant).kernel == kernel


def test_invariant_latents_are_decode() -> None:
    """The only kernel for them."""
    latents = problem(kind="paged-ragged", page_size=16, dim_qk=576, dim_v=512, max_q=1)
    assert choose(latents, ARCHS["gfx950"], batch_invariant=True).kernel == "decode"


@pytest.mark.parametrize(
    ("tokens", "heads", "rows", "pack"),
    [(1, 4, 16, 4), (16, 1, 16, 1), (17, 1, 32, 1), (5, 4, 32, 4), (8, 8, 64, 8), (16, 8, 64, 8), (1, 100, 64, 64)],
)
def test_rows_of_decode(tokens: int, heads: int, rows: int, pack: int) -> None:
    config, _ = decode_config(problem(seq_q=tokens, heads_q=heads), "gfx950")
    assert (config.block_m, config.pack) == (rows, pack)


@pytest.mark.parametrize(
    ("arch", "dim_qk", "dim_v", "heads", "keys", "strips"),
    [
        ("gfx950", 128, 128, 32, 128, (128, 128)),
        ("gfx950", 128, 128, 64, 64, (128, 64)),
        ("gfx950", 64, 136, 4, 64, (64, 64)),
        ("gfx942", 128, 128, 32, 64, (64, 64)),
        ("gfx942", 32, 32, 32, 64, (32, 64)),
    ],
)
def test_keys_of_decode(arch: str, dim_qk: int, dim_v: int, heads: int, keys: int, strips: tuple[int, int]) -> None:
    config, _ = decode_config(problem(dim_qk=dim_qk, dim_v=dim_v, heads_q=heads), arch)
    assert (config.block_n, config.buffers.k_strip, config.buffers.v_strip) == (keys, *strips)


@pytest.mark.parametrize(
    ("arch", "dims", "keys", "strips", "buffers"),
    [
        ("gfx950", (64, 64), 64, (64, 64), ("ring", 2)),
        ("gfx950", (256, 64), 64, (256, 64), ("ring", 2)),
        ("gfx942", (64, 64), 64, (64, 64), ("registers", 1)),
        ("gfx942", (128, 64), 64, (128, 32), ("registers", 1)),
        ("gfx942", (64, 128), 64, (64, 32), ("registers", 1)),
        ("gfx942", (64, 136), 32, (64, 32), ("registers", 1)),
    ],
)
def test_tiles_of_prefill(arch: str, dims: tuple[int, int], keys: int, strips: tuple, buffers: tuple) -> None:
    config, _ = prefill_config(BF16, *dims, arch)
    assert (config.block_n, config.buffers.k_strip, config.buffers.v_strip) == (keys, *strips)
    assert (config.buffers.kind, config.buffers.slots) == buffers


@pytest.mark.parametrize(("dim", "keys"), [(64, 64), (72, 32)])
def test_rings_of_gfx942_have_room_for_fewer_keys(dim: int, keys: int) -> None:
    assert prefill_config(BF16, dim, dim, "gfx942", "ring")[0].block_n == keys


def test_tiles_of_heads_and_queries_are_counted() -> None:
    """3 sequences of 2 key heads. 100 heads of a group in tiles of 64, 16 tokens of 8 heads in tiles of 8 tokens, 300
    queries in tiles of 128."""
    few, many = problem(batch=3, heads_q=200, heads_kv=2), problem(batch=3, seq_q=300, heads_q=4, heads_kv=2)
    assert choose(few, ARCHS["gfx950"]).grid[0] == 3 * 2 * 2
    some = replace(few, seq_q=16, heads_q=16)
    assert choose(some, ARCHS["gfx950"]).grid[0] == 3 * 2 * 2
    assert choose(many, ARCHS["gfx950"]).grid[0] == 3 * 4 * 3


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize(("scales", "strip", "said"), [
    (Scales(), None, 0), (Scales(k=64), 64, 1), (Scales(k=128), None, 1), (Scales(v=64), None, 1),
    (Scales(64, 64), 64, 2),
])  # fmt: skip
def test_keys_and_values_of_8_bits(tokens: int, scales: Scales, strip: int | None, said: int) -> None:
    """They are widened in registers; a strip of keys has one scale at most, and reasons name scales of columns."""
    eight = problem(seq_q=tokens, dim_qk=128, dim_v=128, kv_dtype=torch.float8_e4m3fn, scales=scales)
    choice, plain = choose(eight, ARCHS["gfx950"]), choose(replace(eight, scales=Scales()), ARCHS["gfx950"])
    buffers = choice.config.buffers
    assert (buffers.kind, buffers.k_strip) == ("registers", strip or plain.config.buffers.k_strip)
    assert len(choice.reasons) == len(plain.reasons) + said


@pytest.mark.parametrize(
    ("given", "narrow", "found"),
    [(Scales(), False, (512, 512)), (Scales(), True, (576, 512)), (Scales(128, 128), False, (128, 128))],
)
def test_scales_of_latents(given: Scales, narrow: bool, found: tuple[int, int]) -> None:
    """One of all latents is that of one block of columns; rotary parts of 8 bits have it, too."""
    sizes = {"kind": "paged", "page_size": 16, "dim_qk": 576, "dim_v": 512}
    latents = problem(**sizes, kv_dtype=torch.float8_e4m3fn, scales=given, rope=64, narrow_rope=narrow)
    eight_bit = choose(latents, ARCHS["gfx950"]).config.eight_bit
    assert tuple(eight_bit.scales)[:2] == found
    assert eight_bit.rope == (eight_bit.element if narrow else BF16)
