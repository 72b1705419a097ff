"""Second kernel of a split: the parts of every row, written by the 1Q kernel, become its output and its LSE.

      workspace   o [part, row, column] fp32, normalised over the part's keys      row = (batch, query, head)
                  lse [part, row] fp32, base 2; -inf where the part saw no key

The sink of a head joins here, once a row. Several rows a warp and all parts of a row in one thread: see combine.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon import language as gl

from ..pieces.combine import EqualParts, Partials, combine_block, combine_layout, combine_rows, with_sink
from ..pieces.softmax import LN_2


@gluon.jit
def combine_kernel(
    o_ptr,
    partial_lse_ptr,
    out,
    lse_ptr,
    sinks_ptr,
    shape,
    config: gl.constexpr,
    has_sinks: gl.constexpr,
    has_lse: gl.constexpr,
):
    """`out`: pointer, strides of batch, query, head in units of 8 elements; `shape`: rows, seq_q, heads_q, dim_v.
    Grid: blocks of rows."""
    cols: gl.constexpr = config.padded_ov_depth
    layout: gl.constexpr = combine_layout(cols)
    block: gl.constexpr = combine_block(cols)
    partials = Partials(o_ptr, partial_lse_ptr, shape[0], cols)
    parts = EqualParts(gl.to_tensor(0), gl.to_tensor(1), gl.to_tensor(config.splitk_partitions))
    first = gl.program_id(0) * block[1]
    o, lse = combine_rows(partials, parts, first, layout, block, False)
    row = first + gl.arange(0, block[1], lse.type.layout)
    head = row % shape[2]
    query = row // shape[2] % shape[1]
    batch = row // (shape[1] * shape[2])
    inside = row < shape[0]
    if has_sinks:
        factor, lse = with_sink(lse, gl.load(sinks_ptr + head))
        o = o * factor[:, None]
    if has_lse:
        gl.store(lse_ptr + (batch * shape[2] + head).to(gl.int64) * shape[1] + query, lse * LN_2, mask=inside)
    col = gl.arange(0, cols, gl.SliceLayout(0, o.type.layout))
    place = (batch.to(gl.int64) * out[1] + query.to(gl.int64) * out[2] + head.to(gl.int64) * out[3]) * 8
    values = o.to(out[0].dtype.element_ty)
    gl.store(out[0] + place[:, None] + col[None, :], values, mask=inside[:, None] & (col < shape[3])[None, :])


def combine_source(config, has_sinks: bool, has_lse: bool) -> GluonASTSource:
    """What Triton compiles: the kernel with the types of its parameters and its constants."""
    signature = {
        "o_ptr": "*fp32",
        "partial_lse_ptr": "*fp32",
        "out": (f"*{config.dtype}", "i32", "i32", "i32"),
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "shape": ("i32",) * 4,
        "config": "constexpr",
        "has_sinks": "constexpr",
        "has_lse": "constexpr",
    }
    return GluonASTSource(combine_kernel, signature, {"config": config, "has_sinks": has_sinks, "has_lse": has_lse})
