"""The Hopper backward without a Hopper card: its machine code is compiled here and counted."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.unit.kernels.backward.builds import compiled, long_problem
from warpattn.kernels.sm90.backward.config import CONSUMERS, BackwardConfig, choose, choose_config
from warpattn.kernels.sm90.prefill.config import SMEM_LIMIT
from warpattn.machine_code.roles import role_faults
from warpattn.machine_code.sass import disassembled, opcode_counts, resources
from warpattn.masks import Causal, Full, Mask, Padding, Prefix, SlidingWindow
from warpattn.problem import Call, Problem, validate
from warpattn.problem.arch import ARCHS
from warpattn.scores import ALiBi, Bias, Score, SoftCap
from warpattn.sequences import Dense, Ragged

BIAS = Bias(torch.zeros(1).expand(4096, 4096))
# Bytes of stack the compiler spills to, measured with Triton 3.9.0.
STACK = {
    (64, "full"): 0, (64, "causal"): 0, (96, "causal"): 0, (128, "full"): 16, (128, "causal"): 8, (192, "causal"): 0,
    (256, "full"): 8,
}  # fmt: skip


def config_of(dim: int, mask: str = "full", dim_v: int | None = None) -> BackwardConfig:
    """The config of long sequences."""
    return choose_config(long_problem(dim, mask, dim_v))[0]


@pytest.mark.parametrize(("dim", "mask"), drawn(STACK, [(256, "full")]))
def test_machine_code_is_what_the_config_promises(dim: int, mask: str) -> None:
    config, kernel = config_of(dim, mask), compiled("sm90", (dim, dim), mask)
    cubin = kernel.asm["cubin"]
    counts = opcode_counts(cubin, modifiers=True)
    products = sum(n for name, n in counts.items() if name.startswith("HGMMA"))
    waits = sum(n for name, n in counts.items() if name.startswith("WARPGROUP.DEPBAR"))
    assert products == wgmmas(config)
    assert waits < products / 4, "a wait for nearly every product: the assembler serialised them for want of registers"
    assert resources(cubin).stack <= STACK[dim, mask]
    assert role_faults(kernel.asm) == []
    loops = attending_loops(cubin, loop_products(config))
    assert len(loops) == 2
    assert not any(map(spills, loops)), "a spilled register in an attending loop"
    assert config.topology.smem_bytes <= kernel.metadata.shared <= min(config.topology.smem_bytes + 2048, SMEM_LIMIT)
    assert kernel.metadata.num_warps * 32 == config.topology.threads
    assert config.topology.registers <= 65_536
    halves = 2 if config.claims else 1  # of a part of dQ: one warp copies both boxes, four warps share them
    assert counts["UTMAREDG.3D.ADD"] == config.dq_parts * halves, "dQ is added by TMA"
    assert counts["UTMASTG.3D"] == (config.dq_parts * halves if config.claims else 0), "the first CTA stores it"
    assert not any(name.startswith("STS.") and "128" not in name and "64" not in name for name in counts)


@pytest.mark.full
@pytest.mark.parametrize("mask", drawn(["full", "causal"], ["causal"]))
def test_attending_warpgroups_have_registers_for_dq(mask: str) -> None:
    kernel = compiled("sm90", (192, 128), mask)
    cubin, topology = kernel.asm["cubin"], config_of(192, mask, 128).topology
    counts = opcode_counts(cubin, modifiers=True)
    products = sum(n for name, n in counts.items() if name.startswith("HGMMA"))
    assert products == 2 * 2 * (12 + 8 + 8 + 12 + 8), "S, dP, dV, dK, and dQ of 64 columns"
    assert sum(n for name, n in counts.items() if name.startswith("WARPGROUP.DEPBAR")) < products / 4
    loops = attending_loops(cubin, {12 + 8 + 8 + 12 + 8})
    assert len(loops) == 2 and not any(map(spills, loops))
    assert role_faults(kernel.asm) == []
    assert topology.smem_bytes <= kernel.metadata.shared <= min(topology.smem_bytes + 2048, SMEM_LIMIT)
    assert topology.registers <= 65_536 and kernel.metadata.num_warps * 32 == topology.threads == 384


def wgmmas(config: BackwardConfig) -> int:
    """Warpgroup products in the code: all but that of dQ stand in a loop and once more before or after it."""
    values = config.block_m // 16
    reduce = config.dq_parts * config.key_parts * (config.rows // 16) * (config.dq_rows // 64)
    scores = sum(sum(widths) // 16 for widths in (config.widths_qk, config.widths_v))
    sums = values * (len(config.widths_qk) + len(config.widths_v))
    return (1 if config.by_product else CONSUMERS) * 2 * (scores + sums) + reduce


def loop_products(config: BackwardConfig) -> set[int]:
    """Products of a tile in the loops of attending warpgroups: with keys and values, or each with one of them."""
    values, qk, v = config.block_m // 16, config.widths_qk, config.widths_v
    if config.by_product:
        return {sum(qk) // 16 + values * len(v), sum(v) // 16 + values * len(qk)}
    return {(sum(qk) + sum(v)) // 16 + values * (len(qk) + len(v))}


@pytest.mark.full
@pytest.mark.parametrize("dim", drawn([64, 128], [128]))
def test_heads_side_by_side_spill_in_no_loop(dim: int) -> None:
    kernel, config = compiled("sm90", (dim, dim), "causal", group=8), config_of(dim, "causal")
    counts = opcode_counts(kernel.asm["cubin"], modifiers=True)
    assert sum(n for name, n in counts.items() if name.startswith("WARPGROUP.DEPBAR")) < wgmmas(config) / 4
    attending = attending_loops(kernel.asm["cubin"], loop_products(config))
    loading = innermost_loops(kernel.asm["cubin"], lambda body: "UTMALDG" in body and "HGMMA" not in body)
    assert len(attending) == 2 and loading and not any(map(spills, attending + loading))
    assert role_faults(kernel.asm) == []


@pytest.mark.parametrize(("dim", "dim_v"), drawn([(64, 64), (128, 128), (192, 128), (256, 256)], [(128, 128)]))
def test_turns_spill_in_no_loop(dim: int, dim_v: int) -> None:
    """Nor do they serialise products; the warps that wait, add and pass have 24 registers."""
    problem, dims = long_problem(dim, "causal", dim_v), (dim, dim_v)
    kernel, config = compiled("sm90", dims, "causal", deterministic=True), choose_config(problem, True)[0]
    cubin = kernel.asm["cubin"]
    counts = opcode_counts(cubin, modifiers=True)
    products = sum(n for name, n in counts.items() if name.startswith("HGMMA"))
    assert sum(n for name, n in counts.items() if name.startswith("WARPGROUP.DEPBAR")) < products / 4
    waiting = innermost_loops(cubin, lambda body: "CCTL.IVALL" in body and "HGMMA" not in body)
    assert waiting and not any(map(spills, waiting))
    assert role_faults(kernel.asm) == []
    topology = config.topology
    assert topology.smem_bytes <= kernel.metadata.shared <= min(topology.smem_bytes + 2048, SMEM_LIMIT)
    assert topology.registers <= 65_536 and kernel.metadata.num_warps * 32 == topology.threads


@pytest.mark.parametrize(
    ("score", "rows"),
    [(None, 128), (SoftCap(30.0), 128), (ALiBi(2), 64), (SoftCap(30.0) | ALiBi(2), 64), (BIAS, 64)],
    ids=["none", "soft-cap", "alibi", "both", "bias"],
)
def test_scores_that_depend_on_places_take_fewer_queries(score: Score | None, rows: int) -> None:
    q = torch.empty(1, dtype=torch.float16).expand(1, 4096, 2, 64)
    problem = validate(Call(q, q, q, Dense(), Full(), score, backend="reference"), read_values=False).problem
    assert choose_config(problem)[0].block_m == rows


@pytest.mark.full
@pytest.mark.parametrize("score", drawn([SoftCap(30.0), SoftCap(30.0) | ALiBi(2)], [SoftCap(30.0) | ALiBi(2)]))
def test_slopes_of_scores_take_few_registers(score: Score) -> None:
    kernel, config = compiled("sm90", (128, 128), "causal", score=score), config_of(128, "causal")
    loops = attending_loops(kernel.asm["cubin"], loop_products(config))
    assert len(loops) == 2
    for loop in loops:
        assert len(re.findall(r"\b(?:LDL|STL)\b", loop)) <= 4, "a tile of scores or slopes is spilled"


def spills(code: str) -> bool:
    """Whether code reads or writes a spilled register."""
    return re.search(r"\b(?:LDL|STL)\b", code) is not None


def attending_loops(cubin: bytes, products: set[int]) -> list[str]:
    """Machine code of the innermost loops with the products of an attending warpgroup."""
    return innermost_loops(cubin, lambda body: body.count("HGMMA") in products)


def innermost_loops(cubin: bytes, wanted: Callable[[str], bool]) -> list[str]:
    """Machine code of the innermost loops among those wanted. Waits that go on behind the kernel's last EXIT jump back,
    too: what is between is no loop."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", disassembled(cubin))]
    back = [(int(to, 16), at) for at, text in code for to in re.findall(r"\bBRA.*?0x([0-9a-f]+)", text)]
    bodies = {(to, at): "\n".join(text for here, text in code if to <= here <= at) for to, at in back}
    loops = {at: body for at, body in bodies.items() if wanted(body) and "EXIT" not in body}
    return [body for at, body in loops.items() if not any(o != at and at[0] <= o[0] and o[1] <= at[1] for o in loops)]


def test_heads_of_a_section_run_at_once() -> None:
    def section(mask: Mask, seq: int, deterministic: bool = False) -> int:
        q = torch.empty(1, dtype=torch.bfloat16).expand(16384 // seq, seq, 16, 128)
        problem = validate(Call(q, q, q, Dense(), mask, backend="reference"), read_values=False).problem
        return choose(problem, ARCHS["sm90"], deterministic).order.section

    assert [section(Causal(), seq) for seq in (1024, 4096, 16384)] == [16, 4, 1]
    assert section(Full(), 1024) == section(SlidingWindow(64), 1024, deterministic=True) == 1
    assert [section(Causal(), seq, deterministic=True) for seq in (1024, 4096, 16384)] == [16, 4, 1]


def test_narrow_values_take_less_memory_beside_wide_keys() -> None:
    """Up to 128 columns keys and values have tiles of one width, so that one loop does both."""
    assert config_of(256, dim_v=72).topology.smem_bytes < config_of(256).topology.smem_bytes
    assert config_of(64, dim_v=256).topology.smem_bytes < config_of(256).topology.smem_bytes
    narrow = [config_of(dim, dim_v=dim_v) for dim, dim_v in ((128, 64), (64, 128), (128, 128))]
    assert {(config.padded_qk, config.padded_v) for config in narrow} == {(128, 128)}


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_every_head_dim_has_a_config_that_fits(dim: int) -> None:
    for dim_v in {dim, 128, 8}:
        config = config_of(dim, dim_v=dim_v)
        assert config.topology.smem_bytes + 1024 <= SMEM_LIMIT
        assert config.padded_qk >= dim and config.padded_v >= dim_v
        assert config.topology.registers <= 65_536
        assert config.padded_qk % config.dq_cols == 0


THREE = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("mask", "lengths", "deterministic", "rows"),
    [
        (Causal(), (300,), False, 64),
        (Causal(), (1000,), False, 128),
        (Causal(), (1000,), True, 64),
        (Causal(), (2000,), True, 128),
        (SlidingWindow(64), (2000,), True, 64),
        (SlidingWindow(64), (2000,), False, 64),
        (Full(), (300,), True, 128),
        (Causal(), (300, 3000), False, 64),
        (Causal(), (4000, 3000), False, 128),
        (Full(), (300, 300), False, 128),
        (Causal() & Padding(THREE), (3000,), False, 128),
        (Causal() & Padding(THREE) & Prefix(THREE.clone()), (3000,), False, 64),
    ],
)
def test_short_or_packed_sequences_and_masks_of_several_tensors_take_fewer_queries(
    mask: Mask, lengths: tuple[int, ...], deterministic: bool, rows: int
) -> None:
    assert choose_config(problem_of(mask, lengths, 64), deterministic)[0].block_m == rows


@pytest.mark.parametrize(
    ("mask", "lengths", "dim", "claims"),
    [
        (Causal(), (512,), 128, True),
        (Full(), (16384,), 96, True),
        (Full(), (2048,), 64, True),
        (Full(), (16384,), 64, False),
        (Full(), (3000, 2000), 64, True),
        (Causal(), (512,), 64, True),
        (Causal(), (1000,), 64, False),
        (SlidingWindow(64), (2000,), 64, True),
        (SlidingWindow(64), (4096,), 64, False),
        (Causal(), (300, 3000), 64, True),
        (Causal(), (4000, 3000), 64, False),
        (Causal(), (512,), 192, False),
    ],
)
def test_dq_is_stored_first_where_that_is_faster(mask: Mask, lengths: tuple[int, ...], dim: int, claims: bool) -> None:
    assert choose_config(problem_of(mask, lengths, dim))[0].claims == claims
    assert not choose_config(problem_of(mask, lengths, dim), True)[0].claims


@pytest.mark.parametrize(("keys", "claims"), [(512, True), (513, False)])
def test_warpgroups_that_add_store_first_where_keys_are_few(keys: int, claims: bool) -> None:
    problem = replace(long_problem(192, "causal", 128), seq_k=keys)
    assert choose_config(problem)[0].claims == claims
    packed = replace(problem, kind="ragged", batch=4, seq_k=4 * keys)
    assert choose_config(packed)[0].claims == claims


def problem_of(mask: Mask, lengths: tuple[int, ...], dim: int) -> Problem:
    """Three sequences of a length, or packed ones."""
    ragged = len(lengths) > 1
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    q = torch.empty(1, dtype=torch.float16).expand(*(() if ragged else (3,)), sum(lengths), 2, dim)
    call = Call(q, q, q, Ragged(offsets, offsets) if ragged else Dense(), mask, backend="reference")
    return validate(call, read_values=False).problem
