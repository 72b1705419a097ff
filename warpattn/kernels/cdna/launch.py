"""The launches of a call on gfx942 or gfx950, with every argument by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import ARCHS, compile_options
from warpattn.problem.launch import Choice, Launch, PlanOptions
from warpattn.problem.operands import Operands, modifier_args, programs, run_strides
from warpattn.sequences import PagedKV, Ragged, Sequence

from ..pieces.combine_config import allocate_parts
from .config import CDNAConfig
from .mask_conditions import POSITIONS
from .select import choose, traits_of

MOST_STRIDE = 2**31 - 1  # strides go to the kernel as 32 bits, in units of 8 elements
FARTHEST = 2**30  # elements from the first to the last row of a tile: buffer operations reach 2 GiB


def launches_of_choice(
    checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice | None = None
) -> tuple[Launch, ...]:
    """One launch, or two where the keys are shared out; `choice` replaces the one made from the problem."""
    problem = checked.problem
    arch = checked.backend.removeprefix("simulate:")
    longest = max(problem.seq_q, problem.seq_k)
    if longest >= POSITIONS:
        raise AttentionError(f"the call has {longest} rows or keys; the {arch} backend takes fewer than {POSITIONS}")
    choice = choose(problem, ARCHS[arch]) if choice is None else choice
    config: CDNAConfig = choice.config
    mask, score = programs(checked)
    tiles, m_tiles = _tiles(problem, config, sequence)
    partial = choice.partitions > 1
    traits = traits_of(problem, partial)
    places = _places(problem, x, sequence, config) | {"shape": _shape(problem, sequence, m_tiles, tiles, choice)}
    args = places | {"scale": checked.scale, **modifier_args(checked)}
    parts = _workspace(tiles * choice.partitions, config, x.q.device) if partial else {}

    def source() -> Any:
        from .signature import attention_source  # imports Triton

        return attention_source(config, traits, mask, score)

    key = (config, traits, mask.key, None if score is None else score.key)
    first = Launch(
        f"{arch}.{choice.kernel}", arch, key, source, options(config), (tiles, choice.partitions), args | parts
    )
    return (first, _combine(config, replace(traits, partial=False), arch, places, parts)) if partial else (first,)


def list_launches(checked: CheckedCall, x: Operands, sequence: Sequence, options: PlanOptions) -> tuple[Launch, ...]:
    """The same on a plan's terms."""
    arch = checked.backend.removeprefix("simulate:")
    choice = choose(checked.problem, ARCHS[arch], batch_invariant=options.batch_invariant)
    return launches_of_choice(checked, x, sequence, choice)


def options(config: CDNAConfig) -> Mapping[str, Any]:
    """Options of triton.compile.

    No number of waves per SIMD is asked for: asked for two, LLVM keeps half of a wave's 256 registers as AGPRs, and
    some configs spill that otherwise do not (head dim 72 on gfx950: 36 bytes).
    """
    return compile_options(config.waves)


def _combine(config: CDNAConfig, traits: Any, arch: str, places: dict[str, Any], parts: dict[str, Any]) -> Launch:
    """The launch that adds the parts."""
    names = ("o_ptr", "lse_ptr", "sinks_ptr", "indices", "strides", "shape")
    args = {"o_parts": parts["o_ptr"], "lse_parts": parts["lse_ptr"], **{name: places[name] for name in names}}

    def source() -> Any:
        from .signature import combine_source  # imports Triton

        return combine_source(config, traits)

    grid = (places["shape"][5], config.block_m // config.combine_rows)
    return Launch(f"{arch}.combine", arch, ("combine", config, traits), source, options(config), grid, args)


def _tiles(problem: Problem, config: CDNAConfig, sequence: Sequence) -> tuple[int, int]:
    """(tiles of all heads, query tiles of the longest sequence)."""
    longest = sequence.max_q if isinstance(sequence, Ragged) and sequence.max_q is not None else problem.seq_q
    m_tiles = max(1, -(-longest // (config.block_m // config.pack)))
    group = problem.heads_q // problem.heads_kv
    return problem.batch * problem.heads_kv * -(-group // config.pack) * m_tiles, m_tiles


def _shape(problem: Problem, sequence: Sequence, m_tiles: int, tiles: int, choice: Choice) -> tuple[int, ...]:
    """The kernel's integers, see `place.Shape`."""
    keys = sequence.block_table.shape[1] if isinstance(sequence, PagedKV) else problem.seq_k
    group = problem.heads_q // problem.heads_kv
    return (problem.seq_q, keys, problem.heads_kv, group, m_tiles, tiles, choice.partitions)


def _places(problem: Problem, x: Operands, sequence: Sequence, config: CDNAConfig) -> dict[str, Any]:
    """Tensors and where their rows lie."""
    q = _near(x.q, config.block_m)
    k, v = (_near(t, config.block_n) for t in (x.k, x.v))
    if x.out.stride(-3) * config.block_m >= FARTHEST:
        rule = f"rows must be less than {FARTHEST // config.block_m} elements apart"
        raise AttentionError(f"out has a row stride of {x.out.stride(-3)} elements; {rule} on {config.arch}")
    strides = [s for t in (q, k, v, x.out) for s in _strides(t)]
    if x.lse is None:
        strides += [0, 0]
    else:
        strides += [x.lse.stride(0) if x.lse.ndim == 3 else 0, x.lse.stride(-2)]
    if max(strides) > MOST_STRIDE:
        rule = f"strides must be below {8 * (MOST_STRIDE + 1)} elements, and those of lse below {MOST_STRIDE + 1}"
        raise AttentionError(f"a tensor of the call has rows, heads or a batch too far apart; {rule} on {config.arch}")
    return {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": x.out, "lse_ptr": x.lse, "sinks_ptr": x.sinks,
        "indices": _indices(sequence), "strides": tuple(strides),
    }  # fmt: skip


def _indices(sequence: Sequence) -> tuple[Tensor, ...]:
    """Offsets, or table and lengths, as the kernel walks them: one after the other."""
    if isinstance(sequence, Ragged):
        cu_k = sequence.cu_q if sequence.cu_k is None else sequence.cu_k
        return sequence.cu_q.contiguous(), cu_k.contiguous()
    if isinstance(sequence, PagedKV):
        return sequence.block_table.contiguous(), sequence.lengths.contiguous()
    return ()


def _strides(x: Tensor) -> tuple[int, ...]:
    """(batch or page, row, head) in units of 8 elements; 0 where there is but one."""
    strides = run_strides(x)
    return strides if x.ndim == 4 else (0, *strides)


def _near(x: Tensor, rows: int) -> Tensor:
    """A tensor of which `rows` rows are near enough for 32-bit offsets; others are copied once.

    A cache without a page gets one: an empty sequence points there.
    """
    if x.shape[0] == 0:
        return x.new_zeros(1, *x.shape[1:])
    return x if x.stride(-3) * rows < FARTHEST else x.contiguous()


def _workspace(slots: int, config: CDNAConfig, device: torch.device) -> dict[str, Any]:
    """Where parts go: each tile of each partition has a slot."""
    parts = allocate_parts((slots, config.block_m), config.padded_v, device)
    return {"o_ptr": parts.o, "lse_ptr": parts.lse}
