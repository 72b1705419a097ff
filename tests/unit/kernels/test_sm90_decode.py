"""Machine code of the Hopper decode kernel: products, registers and copies as its configurations promise."""

from dataclasses import replace
from functools import cache

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.launches import ROWS, SmallCall, small_call
from warpattn.kernels.sm90.decode.choice import SLACK, choose, choose_tiles, eight_bit_tiles
from warpattn.kernels.sm90.decode.config import DecodeConfig, LengthSums, Overlap, Schedule
from warpattn.kernels.sm90.decode.launch import list_launches
from warpattn.kernels.sm90.prefill.config import SMEM_LIMIT
from warpattn.machine_code.roles import role_faults
from warpattn.machine_code.sass import opcode_counts, resources
from warpattn.masks import Causal
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.element import BF16, FP16
from warpattn.problem.operands import Operands
from warpattn.quantized import quantize
from warpattn.runtime import compiler
from warpattn.sequences import Dense


def eight_bit_call(dim: int) -> SmallCall:
    """With keys and values of e4m3 whose scales belong to 64 columns."""
    x, q = quantize(torch.zeros(1, 600, 2, dim), per=64), torch.zeros(1, 1, 8, dim).bfloat16()
    sequence, v = Dense(x.scale, x.scale), x.values.detach()
    checked = validate(Call(q, x.values, v, sequence, Causal(), return_lse=True, backend="simulate:sm90"))
    return SmallCall(checked, Operands(q, x.values, v, q.clone(), torch.zeros(checked.lse_shape), None), sequence)


def by_columns(dim: int) -> DecodeConfig:
    """Of such a call."""
    return eight_bit_tiles(eight_bit_call(dim).checked.problem, rows=4)


DENSE = {"schedule": Schedule(sums=None, one_row_tile=True)}
ROW_TILES = {"schedule": Schedule(sums=LengthSums(lane=4), head_overhead=1, has_lengths=True)}
PAGED = {"schedule": replace(ROW_TILES["schedule"], one_row_tile=True)}
PDL = {"overlap": Overlap(pdl=True, prefetch_tiles=4, trigger_max_units=64)}
CONFIGS = {
    "d64-paged": replace(choose_tiles(BF16, 64, 64, 16, rows=4), **PAGED),
    "d64": replace(choose_tiles(BF16, 64, 64, rows=4), **DENSE),
    "d128": replace(choose_tiles(BF16, 128, 128, rows=4), **DENSE),
    "d128-paged": replace(choose_tiles(FP16, 128, 128, 16, rows=8), **PAGED),
    "d128-16-rows": replace(choose_tiles(BF16, 128, 128, rows=16), **DENSE),
    "d128-64-rows": replace(choose_tiles(BF16, 128, 128), **DENSE),
    "d256": replace(choose_tiles(BF16, 256, 256, rows=8), **DENSE),
    "d512": replace(choose_tiles(BF16, 512, 512, rows=8), **DENSE),
    "d512-paged": replace(choose_tiles(BF16, 512, 512, 16, rows=64), **PAGED),
    "d128-columns": replace(by_columns(128), **DENSE),
    "d256-columns": replace(by_columns(256), **DENSE),
    "pdl": replace(choose_tiles(BF16, 128, 128, rows=4), **DENSE, **PDL),
    "row-tiles": replace(choose_tiles(BF16, 128, 128, 16, rows=64), **ROW_TILES, **PDL),
    "pdl-paged": replace(choose_tiles(BF16, 128, 128, 16, rows=4), **PAGED, **PDL),
}
DRAWN = ("pdl-paged",)
# Bytes of stack that the compiler spills to, Triton 3.9.0: a number that an item needs once.
STACK = {"d256": 8, "row-tiles": 8, "d128-64-rows": 32, "d512": 96, "d512-paged": 56}


# Instructions, with a margin. After the last keys the whole launch waits for one warpgroup. About 700 are for values of
# NaN that some rows see (finite.py), twice with 64 rows; launches without any go past them.
LENGTH = {"d64": 3400, "d64-paged": 3500, "d128": 3400, "d128-paged": 5100, "d128-16-rows": 5000, "d128-64-rows": 7100,
          "d256": 4300, "d512-paged": 7300, "row-tiles": 9100}  # fmt: skip


@cache
def compiled(config: DecodeConfig):
    kind = "paged" if config.schedule.has_lengths else "dense"
    dims, page = (config.dim_qk, config.dim_v), config.page_box or 16
    call = small_call("sm90", dims, config.element, kind=kind, rows=(1, ROWS), page=page)
    call = eight_bit_call(config.dim_qk) if config.eight_bit else call
    launch, *_ = list_launches(*call, replace(choose(call.checked.problem, ARCHS["sm90"]), config=config))
    return compiler.compiled(launch)


def products(config: DecodeConfig) -> dict[str, int]:
    """Warpgroup products in the code, by their shape; 64 rows have theirs before the loop and after it too."""
    depth, keys = config.padded_qk // 16, config.block_n // 16
    if config.swap_ab:
        scores, outputs = depth * config.block_n // 64, keys * config.padded_v // 64
        return {f"64x{config.rows}x16": scores + outputs}
    found = {f"64x{config.block_n}x16": 2 * depth}
    found[f"64x{config.padded_v}x16"] = found.get(f"64x{config.padded_v}x16", 0) + 2 * keys
    return found


@pytest.mark.parametrize("name", drawn(CONFIGS, DRAWN))
def test_machine_code(name):
    config, kernel = CONFIGS[name], compiled(CONFIGS[name])
    cubin = kernel.asm["cubin"]
    counts, used = opcode_counts(cubin), resources(cubin)
    assert config.smem_bytes <= kernel.metadata.shared <= min(SMEM_LIMIT, config.smem_bytes + SLACK)
    assert used.stack <= STACK.get(name, 0)
    assert role_faults(kernel.asm) == []
    full = opcode_counts(cubin, modifiers=True)
    for shape, count in products(config).items():
        assert sum(n for code, n in full.items() if code.startswith(f"HGMMA.{shape}.")) == count
    assert counts["HGMMA"] == sum(products(config).values()) and counts["HMMA"] == 0
    blocks = config.scale_blocks("k") + config.scale_blocks("v")  # of columns, whose products follow each other
    assert counts["WARPGROUP"] <= 4 * blocks, "other products do not wait"
    assert sum(counts.values()) <= LENGTH.get(name, 5000)


@pytest.mark.parametrize("name", drawn(CONFIGS, DRAWN))
def test_dependent_launches(name):
    """Threads prefetch one box each, of 64 columns; the block waits once; the producer triggers the next launch."""
    counts, config = opcode_counts(compiled(CONFIGS[name]).asm["cubin"]), CONFIGS[name]
    overlap = config.overlap
    prefetches = config.padded_qk // 64 if overlap.prefetch_tiles else 0
    wanted = (prefetches, overlap.pdl, overlap.trigger_max_units > 0)
    assert (counts["UTMAPF"], counts["ACQBULK"], counts["PREEXIT"]) == wanted


SWAPPED = [name for name, config in CONFIGS.items() if config.swap_ab]


@pytest.mark.parametrize("name", drawn(SWAPPED, [name for name in SWAPPED if name in DRAWN]))
def test_only_probabilities_pass_through_registers(name):
    """Stores of transposed matrices are one tile of P, of each block of columns with scales; keys and values would be
    loaded as matrices, which only sums across warps are."""
    config, blocks = CONFIGS[name], CONFIGS[name].scale_blocks("v")
    full = opcode_counts(compiled(config).asm["cubin"], modifiers=True)
    stored = sum(n * int(code[-1]) for code, n in full.items() if code.startswith("STSM.16.MT88"))
    assert stored == blocks * config.block_n * config.rows // 256, "two elements a register, 128 threads"
    assert sum(n for code, n in full.items() if code.startswith("LDSM")) <= 1 + blocks
    assert full["BAR.RED.OR.DEFER_BLOCKING"] == 1
