"""The Blackwell prefill kernel without a Blackwell card: its machine code is compiled here and counted."""

import re
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import compile as compile_source

from tests.drawn import drawn
from tests.launches import choice_of, small_call
from tests.unit.kernels.backward.test_sm90_backward import innermost_loops, spills
from warpattn.kernels.sm100.config import SMEM_LIMIT, FA4Config
from warpattn.kernels.sm100.launch import prefill_launch
from warpattn.kernels.sm100.traits import Traits
from warpattn.kernels.sm100.wide.config import WideConfig
from warpattn.kernels.sm100.wide.launch import wide_launches
from warpattn.machine_code.roles import role_faults
from warpattn.machine_code.sass import opcode_counts, resources
from warpattn.masks import Causal, Mask, Materialized
from warpattn.problem.arch import triton_target
from warpattn.problem.element import BF16, FP8, FP16
from warpattn.problem.problem import Scales
from warpattn.problem.scales import EightBit
from warpattn.scores import ALiBi, Bias, Score

CASES = {
    "d128": (FA4Config(BF16, 128, 128).gluon()[0], "dense"),
    "d64": (FA4Config(FP16, 64, 64).gluon()[0], "dense"),
    "d128-grouped": (FA4Config(BF16, 128, 128, group=4).gluon()[0], "dense"),
    "d128-ragged": (FA4Config(BF16, 128, 128).gluon()[0], "ragged"),
    "d128-paged": (FA4Config(BF16, 128, 128, page_size=64).gluon()[0], "paged"),
}
DRAWN = ("d128-paged",)
COMPILER_BYTES = 1024  # of shared memory that Triton adds: alignment, and the values that roles are started with


def compile_prefill(config: FA4Config, kind: str, chip: str = "sm100", **changes: Any):
    """The compiled kernel with an LSE; `changes` of a `small_call`."""
    dims, heads = (config.qk_depth, config.ov_depth), (2 * config.group, 2)
    call = small_call("sm100", dims, config.element, kind=kind, page=config.page_size, heads=heads, **changes)
    launch = prefill_launch(*call, choice_of(config), Traits(kind, config.group, False, True))
    return compile_source(launch.source(), target=triton_target(chip), options=launch.options)


@cache
def compiled(name: str, chip: str = "sm100"):
    """The kernel of a case with a causal mask."""
    return compile_prefill(*CASES[name], chip=chip)


# Bytes of stack that Triton 3.9.0 spills to: with pages the number of a warp, written once and read once in each of
# three roles, before their loops.
STACK = {"d128-paged": 8}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_b300_gets_the_same_kernel_in_machine_code_of_its_own(name: str) -> None:
    b200, b300 = (compiled(name, chip).asm for chip in ("sm100", "sm103"))
    code = [re.sub(r'loc\("[^"]*/', 'loc("', made["ttgir"]) for made in (b300, b200)]  # without folders
    assert code[0].replace('"cuda:103"', '"cuda:100"') == code[1]
    assert ".target sm_103a" in b300["ptx"] and resources(b300["cubin"]) == resources(b200["cubin"])


@pytest.mark.parametrize("name", drawn(CASES, DRAWN))
def test_nothing_is_spilled(name: str) -> None:
    used = resources(compiled(name).asm["cubin"])
    config, _ = CASES[name]
    assert used.registers * config.topology.threads == 65_536
    assert role_faults(compiled(name).asm) == []
    assert used.stack <= STACK.get(name, 0)
    assert used.spills == 0 or (name in STACK and used.spills <= 4)


VISIBLE, ADDED = torch.zeros(1, 1, 8, 8, dtype=torch.bool), torch.zeros(1, 1, 8, 8)
MODIFIERS: dict[str, tuple[Mask, Score | None]] = {
    "materialized": (Materialized(VISIBLE), None),
    "bias": (Causal(), Bias(ADDED)),
    "alibi": (Causal(), ALiBi(2)),
    "materialized-and-bias": (Materialized(VISIBLE), Bias(ADDED)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", drawn(MODIFIERS, ["materialized-and-bias"]))
def test_masks_and_scores_that_load_are_not_spilled(name: str) -> None:
    kernel = compile_prefill(*CASES["d128"], modifiers=MODIFIERS[name], rows=(8, 8))
    assert resources(kernel.asm["cubin"]).stack == 0


@pytest.mark.parametrize("name", drawn(CASES, DRAWN))
def test_memory_is_what_the_config_promises(name: str) -> None:
    config, _ = CASES[name]
    metadata = compiled(name).metadata
    assert config.smem_used <= metadata.shared <= config.smem_used + COMPILER_BYTES
    assert metadata.shared <= SMEM_LIMIT
    assert metadata.tmem_size == 1 << (config.tmem_used - 1).bit_length(), "columns are allocated in powers of two"
    assert metadata.num_warps * 32 == config.topology.threads
    assert compiled(name).asm["ttgir"].count("ttng.init_barrier") == config.topology.barriers


@pytest.mark.parametrize("name", drawn(CASES, DRAWN))
def test_instructions_are_what_the_roles_need(name: str) -> None:
    config, _ = CASES[name]
    counts = opcode_counts(compiled(name).asm["cubin"])
    qk, pv, blocks = config.padded_qk_depth // 16, config.BN // 16, config.padded_ov_depth // 64
    assert counts["UTCHMMA"] == 4 * (qk + pv), "each product stands before the loop, in it twice, or behind it"
    assert counts["UTCBAR"] == 4 + 4 + 3, "S and O of each product; K twice and V once given back"
    q_loads, k_loads, v_loads = 2, 2, 2
    boxes = config.BN // config.box_rows
    assert counts["UTMALDG"] == (q_loads + (k_loads + v_loads) * boxes) * config.padded_qk_depth // 64
    assert counts["UTMASTG"] == 2 * blocks
    rescaled = 2 * config.padded_ov_depth // 16
    assert counts["LDTM"] == 2 * 3 + rescaled + 2 * blocks, "S in three parts, O to rescale, O to store"
    assert counts["STTM"] == 2 * 3 + rescaled, "P in three parts, O rescaled"
    assert counts["HMMA"] == counts["HGMMA"] == 0


@pytest.mark.parametrize("name", drawn(CASES, DRAWN))
def test_a_quarter_of_the_exponentials_is_a_polynomial(name: str) -> None:
    config, _ = CASES[name]
    counts = opcode_counts(compiled(name).asm["cubin"], modifiers=True)
    elements = 2 * config.BN  # of a thread, in both softmax warpgroups
    scale_of_o = 2
    again = 2  # the weight of a key and the scale of its row, in the second pass over tiles that met hidden values
    assert counts["MUFU.EX2"] == elements * 3 // 4 + scale_of_o + again
    packed = sum(count for opcode, count in counts.items() if opcode.startswith("FFMA2"))
    again = 3 * config.padded_ov_depth // 16  # the product with a key and the sum with its value
    assert packed - again == elements // 2 + 3 * elements // 4 // 2, "the argument of each, a cubic for a quarter"


def test_registers_move_to_the_softmax() -> None:
    code = compiled("d128-paged").asm["ptx"]
    assert set(re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", code)) >= {"192", "88", "40"}


def test_a_page_goes_to_its_rows_of_both_column_blocks() -> None:
    """A tile of 128 columns is two blocks of 64; a box of a page has to land in the same rows of each."""
    config, _ = CASES["d128-paged"]
    code = compiled("d128-paged").asm["ptx"]
    targets = re.findall(r"cp\.async\.bulk\.tensor\.5d\.shared::cta\.global\S+ \[(%r\d+)\]", code)[:4]
    block, box = config.BN * 128, config.box_rows * 128
    offsets = [re.search(rf"\tadd\.s32 \t{target}, %r\d+, (\d+);", code) for target in targets[1:]]
    assert [int(found[1]) if found else None for found in offsets] == [block, box, block + box]


@pytest.mark.parametrize(("dim", "stack"), drawn([(64, 0), (128, 16)], [(64, 0)]))
def test_pages_too_small_for_a_box_are_copied(dim: int, stack: int) -> None:
    """16 bytes a lane at four places: K and V before the loop, in it, or behind it. TMA loads only queries. Spilled are
    an address and a number, which roles read before their loops or behind them."""
    config = FA4Config(BF16, dim, dim, page_size=1).gluon()[0]
    kernel = compile_prefill(config, "paged")
    used, counts = resources(kernel.asm["cubin"]), opcode_counts(kernel.asm["cubin"])
    assert used.stack <= stack and used.spill_stores <= 2 and used.spill_loads <= 4
    assert counts["LDGSTS"] == 4 * config.BN * dim // (32 * 8)
    assert counts["UTMALDG"] == 2 * dim // 64


WIDE = {  # dims of queries and of values, sequences, keys in parts, page size
    "256": (256, 256, "dense", 1, 0),
    "512-split": (512, 512, "dense", 4, 0),
    "192-128-ragged": (192, 128, "ragged", 1, 0),
    "512-pages-of-3": (512, 512, "paged", 1, 3),
}


# (bytes of stack, stores, loads) with Triton 3.9.0: whether a warp is the first, which allocates tensor memory and
# frees it. Its register is one of those that a tile takes which is attended to again.
WIDE_SPILLS = {"256": (8, 1, 3)}


def check_spills(cubin: bytes, bound: tuple[int, int, int]) -> None:
    """At most so much, and nothing in the loop over key tiles."""
    used = resources(cubin)
    found = used.stack, used.spill_stores, used.spill_loads
    assert all(each <= most for each, most in zip(found, bound, strict=True)), found
    loops = innermost_loops(cubin, lambda body: "LDTM" in body)
    assert loops and not any(map(spills, loops))


@pytest.mark.full
@pytest.mark.parametrize("name", drawn(WIDE, ["512-split"]))
def test_wide_heads(name: str) -> None:
    dim_qk, dim_v, kind, parts, page = WIDE[name]
    rows, keys = (128, 64) if max(dim_qk, dim_v) <= 256 else (64, 32)
    config = WideConfig(BF16, dim_qk, dim_v, rows, keys, page_size=page, splitk_partitions=parts)
    call = small_call("sm100", (dim_qk, dim_v), kind=kind, page=page, heads=(4, 2))
    launch, *_ = wide_launches(*call, choice_of(config, parts))
    kernel = compile_source(launch.source(), target=triton_target("sm100"), options=dict(launch.options))
    counts = opcode_counts(kernel.asm["cubin"])
    assert config.smem_used <= kernel.metadata.shared <= min(SMEM_LIMIT, config.smem_used + COMPILER_BYTES)
    assert kernel.metadata.tmem_size == 512 and config.tmem_used <= 512
    check_spills(kernel.asm["cubin"], WIDE_SPILLS.get(name, (0, 0, 0)))
    scores, output = config.k_blocks * 256 // 16, config.v_blocks * keys // 16
    assert counts["UTCHMMA"] == 2 * scores + output, "Q·K before the loop and in it; P·V"
    assert counts["UTCBAR"] == 6, "S twice and O; their slots given back"
    copies = 0 if page else (2 * config.k_blocks + config.v_blocks) * 256 // 64
    assert counts["UTMALDG"] == copies


@pytest.mark.full
def test_wide_heads_over_8_bits() -> None:
    """Two warps more, which convert, leave the attending ones the registers that they need."""
    stored = EightBit(FP8, Scales("head", "tensor"))
    config = WideConfig(BF16, 256, 256, 128, 64, stages=3, eight_bit=stored)
    launch, *_ = wide_launches(*small_call("sm100", (256, 256), heads=(4, 2)), choice_of(config))
    kernel = compile_source(launch.source(), target=triton_target("sm100"), options=dict(launch.options))
    assert config.smem_used <= kernel.metadata.shared <= min(SMEM_LIMIT, config.smem_used + COMPILER_BYTES)
    check_spills(kernel.asm["cubin"], WIDE_SPILLS["256"])
