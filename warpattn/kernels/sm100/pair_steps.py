"""The launch of the pair kernel, for a choice whose config asks for pairs; no plan does (see pair.py)."""

from __future__ import annotations

from typing import Any

from warpattn.check import AttentionError
from warpattn.operands import Operands, captured, flat, programs
from warpattn.problem import Problem, Ready
from warpattn.step import Choice, Step

from .config import FA4Config
from .traits import Traits

OPTIONS = {"num_warps": 4, "num_ctas": 2, "enable_fp_fusion": True}


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
    lines = (
        f"tile 2 x {config.MMA_M} x {config.BN} over two CTAs, rings of {config.num_kv_stages} K and V slots, K in "
        f"{config.num_qk_stages} chunks of columns, {config.smem_used} bytes of shared memory a CTA",
        f"grid {grid[0]} x {grid[1]} x {grid[2]} clusters, one tile each",
    )
    return Choice("prefill_pair", config, grid, lines, ("the config asks for pairs of CTAs",))


def pair_step(ready: Ready, x: Operands, choice: Choice) -> Step:
    """The launch; its grid counts clusters."""
    p, config = ready.problem, choice.config
    mask, score = programs(ready)
    tensors = tuple(tensor.detach() for tensor in captured(ready))
    count = len(ready.mask.tensors)
    args = {
        "q_desc": x.q, "k_desc": x.k, "v_desc": x.v, "o_desc": x.out, "lse_ptr": x.lse, "sinks_ptr": x.sinks,
        "scale": ready.scale, "shape": (p.seq_q, p.seq_k, p.heads_q, choice.grid[0]),
        "mask_args": flat(tensors[:count]), "score_args": flat(tensors[count:]),
    }  # fmt: skip
    traits = Traits(p.kind, p.heads_q // p.heads_kv, p.has_sinks, p.has_lse)

    def source() -> Any:
        from .pair import pair_source  # imports Triton

        return pair_source(config, traits, mask, score)

    key = (config, traits, mask.key, None if score is None else score.key)
    return Step("sm100.prefill_pair", "sm100", key, source, OPTIONS, choice.grid, args)
