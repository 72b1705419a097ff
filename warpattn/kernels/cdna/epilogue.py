"""Output of a workgroup: normalise O, then write it and the LSE, or a part of both to the workspace.

A part is the result of one partition of the keys: O normalised over these keys and their denominator,
see `pieces/combine.py`. `combine_kernel` combines the parts of a tile, a few rows a workgroup.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna3 import buffer_store

from ..pieces.combine import EqualParts, Partials, combine_rows, with_sink
from ..pieces.modifiers import natural_scale
from ..pieces.scales import has_scale, output_scale
from .softmax import softmax_finish
from .work_tile import packed_offsets, rows_of, tile_offset


@gluon.jit
def store_output(ctx, o, state, work, first):
    """Write O [R, Dv] and, with `has_lse`, LSE [R] of the rows that exist, from row number `first` of the tile on, a
    multiple of R."""
    traits: gl.constexpr = ctx.traits
    scale = natural_scale(ctx)
    rows: gl.constexpr = o.shape[0]
    r = first + gl.arange(0, rows, gl.SliceLayout(1, o.type.layout))
    if has_scale(ctx.config, "v", "tensor", "head"):
        o = o * output_scale(ctx.scales, work.kv_head, ctx.config)
    _, head, inside = rows_of(ctx.shape, work, r, ctx.config)
    if traits.partial:
        factor, denominator = softmax_finish(state, scale)
        parts = Partials(ctx.tensors.o, ctx.tensors.lse, gl.to_tensor(rows), ctx.config.padded_v)
        slot = gl.program_id(1) * ctx.shape.tiles + gl.program_id(0)
        parts.store(slot * (ctx.config.block_m // rows) + first // rows, o * factor[:, None], denominator)
    else:
        sink = 0.0
        if traits.has_sinks:
            sink = gl.load(ctx.tensors.sinks + head, mask=inside, other=0.0)
        factor, denominator = softmax_finish(state, scale, sink, traits.has_sinks)
        store_rows(ctx.tensors, ctx.shape, work, o * factor[:, None], denominator.lse(), r, ctx.config, traits)


@gluon.jit
def store_rows(tensors, shape, work, o, lse, r, config: gl.constexpr, traits: gl.constexpr):
    """Write rows `r` of a tile: O [R, Dv] and the natural log of their denominators [R]."""
    token, head, inside = rows_of(shape, work, r, config)
    if traits.has_lse:
        strides = tensors.strides.lse
        at = work.batch.to(gl.int64) * strides.batch + head.to(gl.int64) * strides.head + work.q_start + token
        gl.store(tensors.lse + at, lse, mask=inside)
    cols = gl.arange(0, config.padded_v, gl.SliceLayout(0, o.type.layout))[None, :]
    mask = inside[:, None]
    if config.dim_v < config.padded_v:
        mask = mask & (cols < config.dim_v)
    base = tensors.o + tile_offset(tensors.strides.o, work)
    values = o.to(tensors.o.dtype.element_ty)
    if config.pack == 1:
        buffer_store(values, base, (r * (tensors.strides.o.row * 8))[:, None] + cols, mask=mask)
    else:
        gl.store(base + packed_offsets(tensors.strides.o, work, token, head)[:, None] + cols, values, mask=mask)


@gluon.jit
def combine_parts(tensors, shape, work, o_parts, denominators, config: gl.constexpr, traits: gl.constexpr):
    """Combine a block of rows of a tile over all partitions and write them."""
    parts = Partials(o_parts, denominators, gl.to_tensor(config.block_m), config.padded_v)
    part = EqualParts(gl.program_id(0), shape.tiles, shape.partitions)
    rows: gl.constexpr = config.combine_rows
    first = gl.program_id(1) * rows
    o, denominator = combine_rows(parts, part, first, config.combine_tile, rows)
    r = first + gl.arange(0, rows, denominator.l.type.layout)
    if traits.has_sinks:
        _, head, inside = rows_of(shape, work, r, config)
        sink = gl.load(tensors.sinks + head, mask=inside, other=0.0)
        factor, denominator = with_sink(denominator, sink)
        o = o * factor[:, None]
    store_rows(tensors, shape, work, o, denominator.lse(), r, config, traits)
