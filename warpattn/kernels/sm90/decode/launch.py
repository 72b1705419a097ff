"""The launches of decode on Hopper, with workspace and arguments.

The workspace has two slots for each CTA (or, batch-invariant, one for each unit), and for each key head a ticket and
the place of its parts. Its size follows from shapes, so a captured graph serves every step. Tickets
are 0 between launches; two launches that may run at once must not share them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError, many
from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Features, Operands, modifier_args, programs
from warpattn.problem.scales import ColumnScaleRows, scale_rows
from warpattn.sequences import PagedKV, PagedRagged, Sequence

from ...nvidia.arguments import strided
from ...pieces.combine_config import MOST_COLUMNS, CombineTile, allocate_parts, combine_tile
from ..arguments import LARGEST_EXPONENT
from .arguments import ColumnScaledRows, DecodeShape, KeyIndex, MappedRows, PartialResults, ScaledQueries, ScaledRows
from .choice import head_rows, head_tiles, partitions, queue_cut, queue_row_tiles, queues_of, row_tiles
from .config import DecodeConfig, LengthSums, StreamConfig

COMBINE_ARGUMENTS = ("out", "keys", "workspace", "lse_ptr", "sinks_ptr", "shape", "mask_args")
PROGRAMS = 2112  # programs of the combining kernel, if there are enough rows: 16 for each SM of an H200


def list_launches(
    checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice
) -> tuple[Launch, ...]:
    """The decode launch and, if needed, that of the combining kernel."""
    problem, config = checked.problem, choice.config
    rows = config.kept_rows if config.swap_ab else head_rows(problem)
    args = arguments(checked, x, sequence, choice) | {"workspace": workspace(problem, choice, rows, x.q.device)}
    args["shape"] = args["shape"]._replace(prefetched=config.overlap.prefetch_tiles)
    config, features = config.compiled, features_of(checked)

    def source():
        from .signature import decode_source  # imports Triton

        return decode_source(args, config, features)

    decode = Launch(
        "sm90.decode", "sm90", (config, features.key), source, options(config), choice.grid, args,
        persistent=args["shape"].queues, pdl=config.overlap.pdl,
    )  # fmt: skip
    if not config.combine.separate_kernel:
        return (decode,)
    return decode, combine_launch(checked, config, args, choice.grid[0])


def combine_launch(checked: CheckedCall, config: StreamConfig, args: Mapping[str, Any], ctas: int) -> Launch:
    """The launch that combines parts after an attention launch of `ctas` CTAs with `args`; also of latent attention."""
    features, heads = features_of(checked), head_tiles(checked.problem)
    shared = {name: args[name] for name in COMBINE_ARGUMENTS}
    # The tile decides the order of sums. It follows from a mean number of parts, which batch invariance rules out.
    invariant = CombineTile(min(config.padded_v, MOST_COLUMNS))
    cut = queue_cut(checked.problem, ctas)
    tile = invariant if config.schedule.invariant else combine_tile(config.padded_v, cut.splits)

    def source():
        from .signature import combine_source  # imports Triton

        return combine_source(shared, config, tile, features)

    blocks = config.padded_v // tile.cols
    rows = min(-(-shared["workspace"].rows // tile.rows), -(-PROGRAMS // (heads * blocks)))
    key, grid = (config, tile, features.key), (heads, rows, blocks)
    return Launch("sm90.combine", "sm90", key, source, compile_options(), grid, shared, pdl=True)


def features_of(checked: CheckedCall) -> Features:
    """The compile-time features of a call's kernels, beside their config."""
    return Features(*programs(checked, LARGEST_EXPONENT), checked.problem.has_sinks, checked.problem.has_lse)


def options(config: DecodeConfig) -> dict[str, Any]:
    """Options of triton.compile."""
    more = {"maxnreg": config.max_registers} if config.ctas > 1 else {}
    return compile_options(config.attending_warps, **more)


def workspace(problem: Problem, choice: Choice, rows: int, device: torch.device) -> PartialResults:
    """Allocates the workspace of a launch with `rows` rows a slot; only the tickets have to be 0."""
    config: StreamConfig = choice.config
    heads, slots = head_tiles(problem), 2 * choice.grid[0]
    if config.schedule.invariant:
        parts = partitions(problem, config, 0)
        slots = heads * parts if parts > 1 else 1  # heads that are not split need no slot
    kept = allocate_parts((slots, rows), config.padded_v, device)
    tickets = torch.zeros(heads, dtype=torch.int32, device=device)
    places = torch.empty(heads, 2, dtype=torch.int32, device=device)
    return PartialResults(kept.o, kept.denominators, rows, tickets, places)


def arguments(checked: CheckedCall, x: Operands, sequence: Sequence, choice: Choice) -> dict[str, Any]:
    """Every argument of the kernel except its workspace; also for latent attention."""
    p = checked.problem
    keys, pages = KeyIndex(None, None, 0, None), p.batch
    if isinstance(sequence, PagedKV | PagedRagged):
        cache = sequence.kv if isinstance(sequence, PagedRagged) else sequence
        cu_q = sequence.cu_q.contiguous() if isinstance(sequence, PagedRagged) else None
        table = cache.block_table
        table = table if table.stride(-1) == 1 else table.contiguous()
        keys, pages = KeyIndex(cache.lengths.contiguous(), table, table.stride(0), cu_q), len(x.k)
    grid = choice.grid[0]
    check_sums(p, choice.config.schedule.sums, grid)
    cut = queue_cut(p, grid)
    shape = DecodeShape(
        batch=p.batch, tokens=p.seq_q, total=len(x.q), capacity=p.seq_k,
        heads=p.heads_kv, group=p.heads_q // p.heads_kv, tiles=row_tiles(p), queues=queues_of(p, grid),
        pages=pages, page_size=max(p.page_size, 1), splits=cut.splits, whole=cut.whole,
    )  # fmt: skip
    key_rows: Callable[..., Any] = strided if choice.config.gathers else MappedRows
    k, v, q = key_rows(x.k), key_rows(x.v), strided(x.q)
    if p.kv_dtype is not None:
        k, v = scaled_rows(x.k, sequence.k_scale), scaled_rows(x.v, sequence.v_scale)
    if p.q_dtype is not None:
        q = ScaledQueries(*q, scale_rows(x.q, sequence.q_scale))
    return {
        "k": k, "v": v, "q": q, "out": strided(x.out), "keys": keys,
        "lse_ptr": x.lse, "sinks_ptr": x.sinks, "scale": checked.scale, "shape": shape, **modifier_args(checked),
    }  # fmt: skip


def check_sums(problem: Problem, sums: LengthSums | None, grid: int) -> None:
    """Raises AttentionError if a schedule, of another grid, sums fewer row tiles than a queue of `grid` CTAs has."""
    row_tiles_of_queue = queue_row_tiles(problem, grid)
    if sums is not None and sums.once and row_tiles_of_queue > sums.width:
        what = f"the grid is {many(grid, 'CTA')}, with {row_tiles_of_queue} row tiles in a queue"
        raise AttentionError(f"{what}; the schedule sums at most {sums.width}")


def scaled_rows(x: Tensor, scale: Tensor | None) -> ScaledRows | ColumnScaledRows:
    """The kernel argument for 8-bit K or V with their scales."""
    rows = scale_rows(x, scale)
    return ColumnScaledRows(x, *rows) if isinstance(rows, ColumnScaleRows) else ScaledRows(x, *rows)
