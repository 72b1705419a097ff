"""Rates of matrix products on a card, for the cost model: `python -m bench.model.rates`.

One CTA of one or two warpgroups repeats chains of products of 64 rows (each) by N columns and 64 of depth, and waits
for each chain. Two lengths of chain tell what a product takes from what a chain and its wait take.
"""

from __future__ import annotations

import sys
from itertools import product

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from bench.measure.arguments import status

DEPTH = gl.constexpr(64)
STEPS = 200


@gluon.jit
def clock(x):
    """The SM's clock."""
    return gl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def chains(out, times, steps, COLUMNS: gl.constexpr, CHAIN: gl.constexpr, REGISTERS: gl.constexpr):
    """Time of `steps` chains of CHAIN products, the left operand in registers or in shared memory."""
    warps: gl.constexpr = gl.num_warps()
    rows: gl.constexpr = 16 * warps
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    a = gl.allocate_shared_memory(gl.bfloat16, [rows, DEPTH], shared)
    b = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, COLUMNS], shared)
    a.store(gl.full([rows, DEPTH], 0.5, gl.bfloat16, loaded))
    b.store(gl.full([DEPTH, COLUMNS], 0.25, gl.bfloat16, loaded))
    fence_async_shared()
    gl.barrier()
    left = a
    if REGISTERS:
        left = a.load(operand)
    acc = gl.zeros([rows, COLUMNS], gl.float32, layout)
    lanes = gl.arange(0, 32 * warps, gl.BlockedLayout([1], [32], [warps], [0]))
    begin = clock(lanes)
    for _ in range(steps):
        for _ in gl.static_range(CHAIN):
            acc = warpgroup_mma(left, b, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    row = gl.arange(0, rows, gl.SliceLayout(1, layout))
    end = clock(lanes)
    gl.store(out + row, gl.sum(acc, 1))
    gl.store(times + lanes, end - begin)


def main() -> int:
    """Print cycles of a product, and of a chain beside its products."""
    print("warps columns left operand  cycles of a product of 64 x N x 64  of a chain beside them")
    for warps, columns, registers in product((4, 8), (64, 128), (False, True)):
        taken = []
        for chain in (2, 8):
            out = torch.zeros(16 * warps, device="cuda")
            times = torch.zeros(32 * warps, dtype=torch.int32, device="cuda")
            for _ in range(3):
                chains[(1,)](out, times, STEPS, columns, chain, registers, num_warps=warps)
            torch.cuda.synchronize()
            taken.append(times.max().item() / STEPS)
        one = (taken[1] - taken[0]) / 6
        where = "registers" if registers else "shared"
        print(f"{warps:5} {columns:7} {where:12} {one:8.1f} {taken[0] - 2 * one:8.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(status(main))
