"""The launches of a call on gfx942 or gfx950, with every argument by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.language.nodes import Program
from warpattn.language.ranges import POSITIONS
from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import ARCHS, compile_options
from warpattn.problem.launch import Choice, Launch, PlanOptions
from warpattn.problem.operands import RUN, Operands, modifier_args, programs, run_of, run_strides
from warpattn.problem.scales import Scales, call_scales, latent_scales, scale_rows
from warpattn.sequences import PagedKV, PagedRagged, Ragged, Sequence
from warpattn.sequences.latent import LatentPages

from ..pieces.combine_config import allocate_parts
from .config import (
    Again,
    CDNAConfig,
    LatentArgs,
    LseStrides,
    PagedIndices,
    PagedRaggedIndices,
    RaggedIndices,
    RowStrides,
    Shape,
    Strides,
)
from .select import choose, traits_of

MAX_STRIDE = 2**31 - 1  # the kernel takes strides as 32 bits, in runs of 16 bytes
FARTHEST = 2**30  # elements from the first to the last row of a tile: buffer operations reach 2 GiB


def launches_of_choice(
    checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice | None = None
) -> tuple[Launch, ...]:
    """One launch, or two where the keys are split into partitions; `choice` replaces the one made from the problem."""
    problem = checked.problem
    arch = checked.backend.removeprefix("simulate:")
    check_longest(problem, arch)
    choice = choose(problem, ARCHS[arch]) if choice is None else choice
    config: CDNAConfig = choice.config
    mask, score = programs(checked)
    tiles, m_tiles = _tiles(problem, config, sequence)
    partial = choice.partitions > 1
    traits = traits_of(problem, partial)
    tensors = _tensor_args(x, sequence, config) | {"shape": _shape(problem, m_tiles, tiles, choice)}
    scale = checked.scale if config.eight_bit is None else _scales(checked.scale, x, sequence)
    parts = _workspace(tiles * choice.partitions, config, x.q.device) if partial else {}
    args = tensors | {"scale": scale, **modifier_args(checked)} | parts
    args["again"] = again_of(args) if _hides(mask) else ()

    def source() -> Any:
        from .signature import attention_source  # imports Triton

        return attention_source(args, config, traits, mask, score)

    key = (config, traits, mask.key, None if score is None else score.key)
    grid = (tiles, choice.partitions)
    first = Launch(f"{arch}.{choice.kernel}", arch, key, source, options(config), grid, args)
    if not partial:
        return (first,)
    return first, _combine(config, replace(traits, partial=False, own_rope=False), arch, tensors, parts)


def again_of(args: Mapping[str, Any]) -> Again:
    """The arguments of a launch that attending again needs."""
    return Again(*(args[name if name in ("shape", "strides", "indices") else f"{name}_ptr"] for name in Again._fields))


def _hides(mask: Program) -> bool:
    """Whether a mask hides any key."""
    keep = mask.outputs[0]
    return not (keep.is_constant and keep.value is True)


def _scales(scale: float, x: Operands, sequence: Sequence) -> Scales:
    """The softmax scale and those of keys and values; latents have one scale as both."""
    cache = cache_of(sequence)
    if not isinstance(cache, LatentPages):
        return call_scales(scale, x, sequence)
    of_latents = latent_scales(x.k, cache.k_scale)
    return Scales(scale, of_latents, of_latents, scale_rows(x.q, None))


def cache_of(sequence: Sequence) -> Sequence:
    """The pages of a sequence, if its keys are in some; else itself."""
    return sequence.kv if isinstance(sequence, PagedRagged) else sequence


def check_longest(problem: Problem, arch: str) -> None:
    """AttentionError where positions do not fit in 32 bits."""
    longest = max(problem.seq_q, problem.seq_k)
    if longest >= POSITIONS:
        raise AttentionError(f"the call has {longest} rows or keys; the {arch} backend takes fewer than {POSITIONS}")


def list_launches(checked: CheckedCall, x: Operands, sequence: Sequence, options: PlanOptions) -> tuple[Launch, ...]:
    """The launches of a call with the options of a plan."""
    arch = checked.backend.removeprefix("simulate:")
    choice = choose(checked.problem, ARCHS[arch], batch_invariant=options.batch_invariant)
    return launches_of_choice(checked, x, sequence, choice)


def options(config: CDNAConfig) -> Mapping[str, Any]:
    """Options of triton.compile.

    The number of waves per SIMD is left to LLVM: told to fit two, it makes half of a wave's 256 registers AGPRs, and
    some configs spill that otherwise do not (head dim 72 on gfx950: 36 bytes).
    """
    return compile_options(config.waves)


def _combine(config: CDNAConfig, traits: Any, arch: str, tensors: dict[str, Any], parts: dict[str, Any]) -> Launch:
    """The launch that combines the parts."""
    names = ("o_ptr", "lse_ptr", "sinks_ptr", "indices", "strides", "shape")
    args = {"o_parts": parts["o_ptr"], "denominators": parts["lse_ptr"], **{name: tensors[name] for name in names}}

    def source() -> Any:
        from .signature import combine_source  # imports Triton

        return combine_source(args, config, traits)

    grid = (tensors["shape"].tiles, config.block_m // config.combine_rows)
    return Launch(f"{arch}.combine", arch, ("combine", config, traits), source, options(config), grid, args)


def _tiles(problem: Problem, config: CDNAConfig, sequence: Sequence) -> tuple[int, int]:
    """(tiles of all heads, query tiles of the longest sequence)."""
    bounded = isinstance(sequence, Ragged | PagedRagged) and sequence.max_q is not None
    longest = sequence.max_q if bounded else problem.seq_q
    m_tiles = max(1, -(-longest // (config.block_m // config.pack)))
    group = problem.heads_q // problem.heads_kv
    return problem.batch * problem.heads_kv * -(-group // config.pack) * m_tiles, m_tiles


def _shape(problem: Problem, m_tiles: int, tiles: int, choice: Choice) -> Shape:
    """The kernel's integers."""
    keys = problem.seq_k // problem.page_size if problem.page_size else problem.seq_k
    group = problem.heads_q // problem.heads_kv
    return Shape(problem.seq_q, keys, problem.heads_kv, group, m_tiles, tiles, choice.partitions)


def _tensor_args(x: Operands, sequence: Sequence, config: CDNAConfig) -> dict[str, Any]:
    """The tensors, their strides, and the offsets or pages of the sequences."""
    q = near(x.q, config.block_m)
    k, v = (near(t, config.block_n) for t in (x.k, x.v))
    check_written("out", x.out, config.block_m, config.arch)
    strides = Strides(*map(row_strides, (q, k, v, x.out)), _lse_strides(x.lse))
    check_strides(strides, config.arch)
    rope = sequence.q_rope
    if rope is not None:
        rope = near(rope, config.block_m)
        q = LatentArgs(q, rope, row_strides(rope))
    cache = cache_of(sequence)
    if isinstance(cache, LatentPages):
        rope = near(cache.rope, config.block_n)
        k = LatentArgs(k, rope, row_strides(rope))
    return {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": x.out, "lse_ptr": x.lse, "sinks_ptr": x.sinks,
        "indices": indices_of(sequence), "strides": strides,
    }  # fmt: skip


def check_written(name: str, x: Tensor, rows: int, arch: str) -> None:
    """AttentionError if `rows` rows of an output are too far apart for 32-bit offsets."""
    if x.stride(-3) * rows >= FARTHEST:
        rule = f"rows must be less than {FARTHEST // rows} elements apart"
        raise AttentionError(f"{name} has a row stride of {x.stride(-3)} elements; {rule} on {arch}")


def check_strides(strides: tuple[tuple[int, ...], ...], arch: str) -> None:
    """AttentionError if a stride does not fit in 32 bits."""
    if max(max(each) for each in strides) > MAX_STRIDE:
        rule = f"strides must be below {16 * (MAX_STRIDE + 1)} bytes, and those of lse below {MAX_STRIDE + 1}"
        raise AttentionError(f"a tensor of the call has rows, heads or a batch too far apart; {rule} on {arch}")


def indices_of(sequence: Sequence) -> tuple[Tensor, ...]:
    """Offsets, table and lengths, contiguous."""
    if isinstance(sequence, Ragged):
        cu_k = sequence.cu_q if sequence.cu_k is None else sequence.cu_k
        return RaggedIndices(sequence.cu_q.contiguous(), cu_k.contiguous())
    if isinstance(sequence, PagedKV):
        return PagedIndices(sequence.block_table.contiguous(), sequence.lengths.contiguous())
    if isinstance(sequence, PagedRagged):
        return PagedRaggedIndices(len(sequence.kv.lengths), sequence.cu_q.contiguous(), *indices_of(sequence.kv))
    return ()


def row_strides(x: Tensor) -> RowStrides:
    """Of a tensor of rows; ragged ones have no outer axis."""
    strides = [stride // (run_of(x) // RUN) for stride in run_strides(x)]
    return RowStrides(*strides) if x.ndim == 4 else RowStrides(0, *strides)


def _lse_strides(lse: Tensor | None) -> LseStrides:
    if lse is None:
        return LseStrides(0, 0)
    return LseStrides(lse.stride(0) if lse.ndim == 3 else 0, lse.stride(-2))


def near(x: Tensor, rows: int) -> Tensor:
    """The tensor, or a packed copy if `rows` of its rows are too far apart for 32-bit offsets.

    A cache without a page gets one, so that an empty sequence has an address to point at.
    """
    if x.shape[0] == 0:
        return x.new_zeros(1, *x.shape[1:])
    return x if x.stride(-3) * rows < FARTHEST else x.contiguous()


def _workspace(slots: int, config: CDNAConfig, device: torch.device) -> dict[str, Any]:
    """Memory for the parts: a slot for each tile of each partition."""
    parts = allocate_parts((slots, config.block_m), config.padded_v, device)
    return {"o_ptr": parts.o, "lse_ptr": parts.denominators}
