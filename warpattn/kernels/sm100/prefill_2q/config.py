"""The config of two query tiles a CTA on Blackwell, its grid, and why."""

from __future__ import annotations

from dataclasses import replace

from warpattn.errors import many
from warpattn.problem import Problem
from warpattn.problem.element import ELEMENT_OF
from warpattn.problem.launch import Choice
from warpattn.problem.operands import COPY_RULE
from warpattn.problem.scales import eight_bit_of

from ..config import FA4Config
from ..traits import LEAST_ROWS

CONVERTED = "keys and values of 8 bits become 16-bit ones in two warps of their own"
SCALED = "they are multiplied by the scales of their tokens there, and rounded once, to the dtype of the queries"
LEAST_DIM = 64  # smaller head dims are padded to one swizzle of 128 bytes


def choose_2q(problem: Problem) -> Choice:
    """The choice of two query tiles a CTA, whatever the size of the problem."""
    config, reasons = prefill_config(problem)
    heads = problem.heads_q // config.tile_heads
    grid = (max(1, -(-problem.longest_q // config.BM_eff)), heads, problem.batch)
    ring = "one ring for K and V" if config.use_shared_kv else "a ring each for K and V"

    def lines() -> tuple[str, ...]:
        return (
            f"tile 2 x {config.BM_q} x {config.BN}, {ring} of {many(config.num_kv_stages, 'slot')}, {config.smem_used} "
            f"bytes of shared memory, {config.tmem_used} columns of tensor memory",
            f"grid {grid[0]} x {grid[1]} x {grid[2]}, one tile a CTA",
        )

    first = "two query tiles a CTA: the softmax of one runs beside the products of the other"
    last = "the longest query tiles have the lowest numbers, so they start first"
    return Choice("prefill", config, grid, lines, (first, *reasons, last, COPY_RULE))


def prefill_config(problem: Problem) -> tuple[FA4Config, tuple[str, ...]]:
    """The config of two query tiles, and a sentence for each thing that is not as one would expect."""
    group = problem.heads_q // problem.heads_kv
    reasons = []
    if group > 1 and "h" in problem.span_reads.symbols:
        reasons.append("query heads have CTAs of their own: the mask's key interval depends on the head")
    fused = 1 if reasons else group
    dims = (max(LEAST_DIM, problem.dim_qk), max(LEAST_DIM, problem.dim_v))
    element, out, eight_bit = problem.element, None, eight_bit_of(problem)
    if problem.q_dtype is not None and eight_bit is not None:
        element, out = ELEMENT_OF[problem.q_dtype], problem.element
        eight_bit = replace(eight_bit, scales=problem.block_scales)
    config, changes = FA4Config(
        element, *dims, group=fused, page_size=problem.page_size, eight_bit=eight_bit, out_element=out
    ).gluon()
    if config.converts and config.num_qk_stages > 1:  # the warps that convert take K whole
        config = replace(config, max_qk_stages=1)
    if config.box_rows < LEAST_ROWS:
        what = f"pages of {many(problem.page_size, 'key')} hold no box of {LEAST_ROWS} rows"
        changes = (*changes, f"{what}: ordinary copies fetch them row by row, one key tile at a time")
    if config.products:
        changes = (*changes, "products are of 8 bits; weights are rounded to e4m3")
    if config.converts:
        changes = (*changes, CONVERTED)
        if config.eight_bit is not None and config.eight_bit.by_token:
            changes = (*changes, SCALED)
    if config.fuse_gqa:
        reasons.append(f"{group} query heads share a key head and a tile: K and V are loaded once for them")
    elif fused > 1:
        reasons.append(f"query heads have CTAs of their own: {config.MMA_M} rows are no multiple of {group} heads")
    return config, (*reasons, *changes)
