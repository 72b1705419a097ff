"""The choice of a config with pairs of CTAs, and why no plan makes it."""

from __future__ import annotations

from warpattn.errors import AttentionError
from warpattn.problem import Problem
from warpattn.problem.launch import Choice

from ..config import FA4Config

NOT_CHOSEN = "each CTA works alone: pairs of CTAs are reported to be slower, and no card has measured this kernel"


def pair_choice(problem: Problem, config: FA4Config) -> Choice:
    """The choice of a config with pairs of CTAs; AttentionError where it cannot be."""
    reasons = [*config.supported()]
    if problem.kind != "dense":
        reasons.append(f"the problem is {problem.kind}; pairs of CTAs take dense batches")
    if config.padded_qk_depth != config.padded_ov_depth:
        reasons.append(f"head dims are {config.qk_depth} and {config.ov_depth}; pairs of CTAs need them padded alike")
    if reasons:
        raise AttentionError(*reasons)
    tiles = max(1, -(-problem.seq_q // config.PairBM_eff))
    grid = (tiles, problem.heads_q // config.tile_heads, problem.batch)

    def lines() -> tuple[str, ...]:
        return (
            f"tile 2 x {config.MMA_M} x {config.BN} over two CTAs, rings of {config.num_kv_stages} K and V slots, K in "
            f"{config.num_qk_stages} chunks of columns, {config.smem_used} bytes of shared memory a CTA",
            f"grid {grid[0]} x {grid[1]} x {grid[2]} clusters, one tile each",
        )

    return Choice("prefill_pair", config, grid, lines, ("the config has pairs of CTAs",))
