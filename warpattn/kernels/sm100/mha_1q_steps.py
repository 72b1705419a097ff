"""When a Blackwell problem gets the kernel of one query tile, into how many parts its keys are split, and its launches.

One CTA for two query tiles leaves SMs idle when there are few tiles. Half-sized tiles make twice the CTAs, and the keys
of a tile can be shared out over 2, 4, 8 or 16 of them; another kernel then combines the parts:

      sm100.prefill_1q   ── parts: o, base-2 LSE ──▶   sm100.combine      (alone where nothing is split)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from warpattn.operands import Operands, captured, flat, programs
from warpattn.problem import Problem, Ready
from warpattn.step import Choice, Step
from warpattn.target import Arch

from .config import FA4Config

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
SPLITS = (16, 8, 4, 2)
KEYS_PER_PART = 512  # at least, so that the combination stays small beside the parts; counted, not timed on a card


def choose_1q(problem: Problem, two: FA4Config, target: Arch) -> Choice | None:
    """The choice for a problem whose CTAs of two query tiles (config `two`) do not fill the chip; else None."""
    if not two.can_switch_to_1q() or _ctas(problem, two) >= target.processors:
        return None
    one, changes = replace(two, BM=128).gluon()
    ctas = _ctas(problem, one)
    fits = (p for p in SPLITS if ctas * p <= target.processors and problem.seq_k >= KEYS_PER_PART * p)
    few = f"two query tiles a CTA would make {_ctas(problem, two)} CTAs for {target.processors} SMs; one makes {ctas}"
    return choice_of(problem, replace(one, splitk_partitions=next(fits, 1)), (few, *changes))


def choice_of(problem: Problem, config: FA4Config, reasons: tuple[str, ...] = ()) -> Choice:
    """The choice of a config with one query tile."""
    parts = config.splitk_partitions
    tiles, heads, batch = _grid(problem, config)
    ring = "one ring for K and V" if config.use_shared_kv else "a ring each for K and V"
    chunks = f", K in {config.num_qk_stages} chunks of columns" if config.num_qk_stages > 1 else ""
    lines = (
        f"tile 1 x {config.BM_q} x {config.BN}, {ring} of {config.num_kv_stages} slots{chunks}, {config.smem_used} "
        f"bytes of shared memory, {config.tmem_used} columns of tensor memory",
        f"grid {tiles * parts} x {heads} x {batch}, the keys of a tile in {parts} parts",
    )
    split = (f"keys are shared out over {parts} CTAs a tile: {tiles * heads * batch} tiles",) if parts > 1 else ()
    return Choice("prefill_1q", config, (tiles * parts, heads, batch), lines, (*reasons, *split), partitions=parts)


def _grid(problem: Problem, config: FA4Config) -> tuple[int, int, int]:
    """(query tiles, heads, batch)."""
    heads = problem.heads_q // config.group if config.fuse_gqa else problem.heads_q
    return max(1, -(-problem.seq_q // config.BM_eff)), heads, problem.batch


def _ctas(problem: Problem, config: FA4Config) -> int:
    tiles, heads, batch = _grid(problem, config)
    return tiles * heads * batch


def steps_1q(ready: Ready, x: Operands, choice: Choice) -> tuple[Step, ...]:
    """The launches of a dense call with a choice of `choose_1q`."""
    config, p = choice.config, ready.problem
    if choice.partitions == 1:
        return (_prefill(ready, x, choice, x.out, x.lse, p.has_sinks, p.has_lse),)
    device, parts = x.q.device, choice.partitions * p.batch
    o = torch.empty(parts, p.seq_q, p.heads_q, config.padded_ov_depth, dtype=torch.float32, device=device)
    lse = torch.empty(parts, p.seq_q, p.heads_q, dtype=torch.float32, device=device)
    return _prefill(ready, x, choice, o, lse, False, True), _combine(ready, x, config, o, lse)


def _prefill(ready: Ready, x: Operands, choice: Choice, out: Tensor, lse: Tensor | None, has_sinks: bool,
             has_lse: bool) -> Step:  # fmt: skip
    """The launch that writes the output, or the parts of it."""
    p, config = ready.problem, choice.config
    mask, score = programs(ready)
    tensors = tuple(tensor.detach() for tensor in captured(ready))
    count = len(ready.mask.tensors)
    tiles = choice.grid[0] // choice.partitions
    args = {
        "q_desc": x.q, "k_desc": x.k, "v_desc": x.v, "o_desc": out, "lse_ptr": lse, "sinks_ptr": x.sinks,
        "scale": ready.scale, "shape": (p.seq_q, p.seq_k, p.heads_q, tiles), "mask_args": flat(tensors[:count]),
        "score_args": flat(tensors[count:]),
    }  # fmt: skip
    group = p.heads_q // p.heads_kv

    def source():
        from .mha_1q_build import source_1q  # imports Triton

        return source_1q(config, mask, score, group, has_sinks, has_lse)

    key = (config, mask.key, None if score is None else score.key, group, has_sinks, has_lse)
    return Step("sm100.prefill_1q", "sm100", key, source, OPTIONS, choice.grid, args)


def _combine(ready: Ready, x: Operands, config: FA4Config, o: Tensor, lse: Tensor) -> Step:
    """The launch that combines the parts `o` and `lse`."""
    p = ready.problem
    rows = p.batch * p.seq_q * p.heads_q
    strides = [stride // 8 if size > 1 else 0 for size, stride in zip(x.out.shape[:3], x.out.stride()[:3], strict=True)]
    args = {
        "o_ptr": o, "partial_lse_ptr": lse, "out": (x.out, *strides), "lse_ptr": x.lse, "sinks_ptr": x.sinks,
        "shape": (rows, p.seq_q, p.heads_q, p.dim_v),
    }  # fmt: skip
    grid = (-(-rows // rows_per_program(config.padded_ov_depth)),)

    def source():
        from .split_combine import combine_source  # imports Triton

        return combine_source(config, p.has_sinks, p.has_lse)

    key = (config, p.has_sinks, p.has_lse)
    return Step("sm100.combine", "sm100", key, source, OPTIONS, grid, args)


def rows_per_program(cols: int) -> int:
    """Rows that a program of the combination takes: four warps, a lane for four columns."""
    return 4 * (32 // min(32, cols // 4))
