"""The kernel that combines partial outputs of a prefill with split keys into outputs and LSE.

      workspace   o [part, row, column] fp32, normalised over the part's keys      row = (batch, query, head)
                  denominators [part, row], packed; `NO_KEY` where the part saw no key

It adds the sink of a head to each row's denominator. A warp has several rows; one thread reads all parts of its columns
(combine.py). The launch overlaps the end of the preceding one (PDL).
"""

from collections.abc import Mapping
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from ..pieces.combine import EqualParts, Partials, combine_rows, with_sink
from ..pieces.combine_config import CombineTile
from ..pieces.scheduler_varlen import BLOCKS, RECORD
from ..pieces.signature import kernel_source


@gluon.jit
def combine_kernel(
    o_ptr, denominators_ptr, out, lse_ptr, sinks_ptr, shape, only,
    config: gl.constexpr, has_sinks: gl.constexpr, has_lse: gl.constexpr,
):  # fmt: skip
    """`out`: `CombinedArgs`, strides in runs of 8 elements; `shape`: `CombineShape`; `only`: None, `ListedArgs` or
    `UsedRows`; `config`: `CombineTile`. Grid: blocks of rows, of all rows or of each row tile of the list."""
    gdc_wait()
    cols: gl.constexpr = config.cols
    partials = Partials(o_ptr, denominators_ptr, shape.rows, cols)
    begin, end = rows_of(shape, only)
    first = begin + gl.program_id(0) * config.rows
    parts = EqualParts(gl.to_tensor(0), gl.to_tensor(1), gl.where(first < end, shape.parts, 0))
    o, denominator = combine_rows(partials, parts, first, config, config.rows)
    row = first + gl.arange(0, config.rows, denominator.l.type.layout)
    head = row % shape.heads_q
    query = row // shape.heads_q % shape.seq_q
    batch = row // (shape.seq_q * shape.heads_q)
    inside = row < end
    if has_sinks:
        factor, denominator = with_sink(denominator, gl.load(sinks_ptr + head))
        o = o * factor[:, None]
    if has_lse:
        at = (batch * shape.heads_q + head).to(gl.int64) * shape.seq_q + query
        gl.store(lse_ptr + at, denominator.lse(), mask=inside)
    col = gl.arange(0, cols, gl.SliceLayout(0, o.type.layout))
    start = (batch.to(gl.int64) * out.batch + query.to(gl.int64) * out.token + head.to(gl.int64) * out.head) * 8
    values = o.to(out.pointer.dtype.element_ty)
    gl.store(out.pointer + start[:, None] + col[None, :], values, mask=inside[:, None] & (col < shape.dim_v)[None, :])


@gluon.jit
def rows_of(shape, only):
    """(first row, row after the last) of a program's row tile; of all rows without a list."""
    if len(only) == 0:
        return gl.to_tensor(0), shape.rows
    elif len(only) == 2:
        return gl.to_tensor(0), gl.load(only.cu_q + only.batch) * shape.heads_q
    else:
        listed = only
        number = gl.program_id(1)
        there = number < gl.load(listed.pointer + BLOCKS)
        record = listed.pointer + RECORD + number * RECORD
        row = gl.load(record + 1, mask=there, other=0)
        start = gl.load(record + 2, mask=there, other=0) * listed.row_unit + row
        tokens = gl.minimum(gl.load(record + 3, mask=there, other=0) - row, listed.tokens)
        return start * shape.heads_q, (start + tokens) * shape.heads_q


def combine_source(args: Mapping[str, Any], config: CombineTile, has_sinks: bool, has_lse: bool) -> GluonASTSource:
    """The kernel's source for a launch with `args`."""
    return kernel_source(combine_kernel, args, {"config": config, "has_sinks": has_sinks, "has_lse": has_lse})
