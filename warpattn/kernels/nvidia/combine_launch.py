"""The workspace of a prefill with split keys, and the launch that combines its partial outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands, run_strides

from ..pieces.combine_config import CombineTile, Parts, allocate_parts
from .arguments import CombinedArgs, CombineShape, ListedArgs, UsedRows

OPTIONS = compile_options()


class ListedRows(NamedTuple):
    """The rows of a tile list, with an upper bound of its number of row tiles."""

    args: ListedArgs
    most: int


Only = ListedRows | UsedRows | None


def workspace(problem: Problem, partitions: int, cols: int, q: Tensor) -> Parts:
    """Allocates partial outputs for (parts * batch, queries, heads) rows; for ragged queries the batch is 1."""
    batch = 1 if problem.ragged_queries else problem.batch
    return allocate_parts((partitions * batch, problem.seq_q, problem.heads_q), cols, q.device)


def combine_launch(
    arch: str, checked: CheckedCall, x: Operands, partitions: int, parts: Parts, only: Only = None
) -> Launch:
    """The launch that combines partial outputs, of all rows or of `only` some."""
    p, cols = checked.problem, parts.o.shape[-1]
    tile = CombineTile(cols, 1 << (partitions - 1).bit_length())
    rows = parts.denominators.numel() // partitions
    limits = only.args if isinstance(only, ListedRows) else () if only is None else only
    args = {
        "o_ptr": parts.o, "denominators_ptr": parts.denominators, "out": CombinedArgs(x.out, *_strides(x.out)),
        "lse_ptr": x.lse, "sinks_ptr": x.sinks, "shape": CombineShape(rows, p.seq_q, p.heads_q, p.dim_v, partitions),
        "only": limits,
    }  # fmt: skip

    def source() -> Any:
        from .combine_parts import combine_source  # imports Triton

        return combine_source(args, tile, p.has_sinks, p.has_lse)

    key = (tile, p.element, p.has_sinks, p.has_lse, type(limits).__name__)
    grid = (-(-rows // tile.rows),)
    if isinstance(only, ListedRows):
        grid = (-(-only.args.tokens * p.heads_q // tile.rows), only.most)
    return Launch(f"{arch}.combine", arch, key, source, OPTIONS, grid, args, pdl=True)


def _strides(out: Tensor) -> tuple[int, ...]:
    """Strides of batch, token and head in runs; ragged rows have no batch."""
    return (*[0] * (4 - out.ndim), *run_strides(out))
