"""Output of a workgroup: normalise O, write it and the LSE."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .place import row_offsets, row_places
from .softmax import softmax_finish


@gluon.jit
def store_output(ctx, o, state, place, c):
    """Write O [M, Dv] and, if asked for, LSE [M] of the rows that exist."""
    config: gl.constexpr = ctx.config
    token, head, inside = row_places(ctx.shape, place, o.type.layout, config)
    sink = 0.0
    if ctx.traits.has_sinks:
        sink = gl.load(ctx.tensors.sinks + head, mask=inside, other=0.0)
    factor, lse = softmax_finish(state, c, sink, ctx.traits.has_sinks)
    out = ctx.tensors.o
    lse_out = ctx.tensors.lse
    strides = ctx.tensors.strides
    if ctx.traits.partial:
        out += gl.program_id(1).to(gl.int64) * (strides[14] * 8)
        lse_out += gl.program_id(1).to(gl.int64) * strides[15]
    if ctx.traits.has_lse:
        at = place.batch.to(gl.int64) * strides[12] + head.to(gl.int64) * strides[13] + place.q_start + token
        gl.store(lse_out + at, lse, mask=inside)
    cols = gl.arange(0, config.padded_v, gl.SliceLayout(0, o.type.layout))[None, :]
    mask = inside[:, None]
    if config.dim_v < config.padded_v:
        mask = mask & (cols < config.dim_v)
    values = (o * factor[:, None]).to(out.dtype.element_ty)
    gl.store(out + row_offsets(ctx.tensors, place, token, head, 9)[:, None] + cols, values, mask=mask)
