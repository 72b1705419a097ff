"""The Blackwell backward without a Blackwell card: its machine code is compiled here and counted."""

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.sim.backward import Case, captured_launch
from tests.unit.kernels.backward.builds import compiled, long_problem
from warpattn.kernels.sm100.backward.config import BackwardConfig, choose_config
from warpattn.kernels.sm100.config import SMEM_LIMIT, TMEM_COLUMNS
from warpattn.machine_code.roles import role_faults
from warpattn.machine_code.sass import opcode_counts, resources
from warpattn.masks import Causal
from warpattn.runtime import compiler
from warpattn.scores import Bias

COMPILER_BYTES = 1024  # of shared memory that Triton adds: alignment, and the values that roles are started with
# Bytes of stack that Triton 3.9.0 spills to before the roles start: some numbers of the CTA, read again by each role.
STACK = {
    (64, 64, "full"): 16, (64, 64, "causal"): 16, (128, 128, "full"): 16, (128, 128, "causal"): 24,
    (192, 128, "full"): 32, (192, 128, "causal"): 40, (256, 256, "full"): 32, (256, 256, "causal"): 32,
}  # fmt: skip


def config_of(dim: int, mask: str = "full", dim_v: int | None = None) -> BackwardConfig:
    """The config of long sequences."""
    return choose_config(long_problem(dim, mask, dim_v))[0]


@pytest.mark.parametrize(
    ("dim", "dim_v", "mask"), drawn(STACK, [(128, 128, "full")])
)
def test_machine_code_is_what_the_config_promises(dim: int, dim_v: int, mask: str) -> None:
    config, kernel = config_of(dim, mask, dim_v), compiled("sm100", (dim, dim_v), mask)
    counts, used = opcode_counts(kernel.asm["cubin"], modifiers=True), resources(kernel.asm["cubin"])
    smem = config.topology.smem_bytes
    assert smem <= kernel.metadata.shared <= min(smem + COMPILER_BYTES, SMEM_LIMIT)
    assert kernel.metadata.tmem_size == TMEM_COLUMNS
    assert kernel.metadata.num_warps * 32 == config.topology.threads
    assert kernel.asm["ttgir"].count("ttng.init_barrier") == config.topology.barriers
    assert used.registers * config.topology.threads == 65_536 and used.stack <= STACK[dim, dim_v, mask]
    assert role_faults(kernel.asm) == []
    assert counts["UTCHMMA"] == products(config)
    assert counts["UTMAREDG.3D.ADD"] == config.dq_parts, "dQ is added by TMA"
    assert counts["MUFU.EX2"] >= config.rows * config.block_m // 128 and not counts["HMMA"]
    sums = (config.padded_qk + config.padded_v) // 64
    if config.wide:
        tiles = 2 + config.dq_parts + sums
        halves = counts["LDTM.16dp32bit_t0_t15.x32"], counts["LDTM.16dp32bit_t16_t31.x32"]
        assert halves == (tiles, tiles), "half a key a thread"
        assert not any(name.startswith("STTM") for name in counts), "P is in shared memory"
    else:
        assert counts["LDTM.x64"] == 2 * config.block_m // 64 + sums, "a key a thread: S, dP; dV, dK at the end"
        parts = config.block_m // 64
        assert counts["LDTM.x32"] == parts + 2 and counts["STTM.x32"] == parts, "P, and dQ"


def products(config: BackwardConfig) -> int:
    """Instructions of 16 columns deep: S and dP stand before the loop and in it, the sums in it alone, each once for
    every block of columns that tensor memory has one after the other."""
    depth, qk, v = 16, config.padded_qk, config.padded_v
    blocks_qk, blocks_v = qk // config.block_columns(qk), v // config.block_columns(v)
    sums = config.block_m // depth * (blocks_qk + blocks_v)
    return 2 * (qk + v) // depth + sums + config.block_n // depth * blocks_qk


@pytest.mark.parametrize("dim", drawn([64, 256], [256]))
def test_the_kernel_for_captured_tensors_spills_nothing(dim: int) -> None:
    case = Case(100, 200, dim=dim, mask=Causal(), score=Bias(torch.zeros(1, 1, 100, 200)), arch="sm100")
    launch = captured_launch(case)
    kernel = compiler.compiled(launch)
    used, counts = resources(kernel.asm["cubin"]), opcode_counts(kernel.asm["cubin"])
    assert used.stack == 0 and used.registers <= 255 and role_faults(kernel.asm) == []
    assert counts["UTCHMMA"] == 2 * 2 * dim // 16, "S and dP, in each of two walks over the keys"
    assert kernel.metadata.tmem_size == 64, "S and dP have the same columns in different lanes"


@pytest.mark.full
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_b300_gets_the_same_kernel_in_machine_code_of_its_own(dim: int) -> None:
    b200, b300 = (compiled("sm100", (dim, dim), "causal", chip) for chip in ("sm100", "sm103"))
    assert ".target sm_103a" in b300.asm["ptx"]
    assert resources(b300.asm["cubin"]) == resources(b200.asm["cubin"])
    assert opcode_counts(b300.asm["cubin"])["UTCHMMA"] == products(config_of(dim))


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_every_head_dim_has_a_config_that_fits(dim: int) -> None:
    for dim_v in {dim, 256, 128, 8}:
        config = config_of(dim, dim_v=dim_v)
        assert config.topology.smem_bytes + COMPILER_BYTES <= SMEM_LIMIT
        assert config.padded_qk >= dim and config.padded_v >= dim_v
        assert config.topology.registers == 65_536
        assert config.tmem_columns <= TMEM_COLUMNS
