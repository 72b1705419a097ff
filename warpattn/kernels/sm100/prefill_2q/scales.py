"""Scales of tokens, and of blocks of their columns, where two warps make 16-bit tiles of 8-bit keys and values.

      table ──▶ pages of tile n+2, registers        a tile earlier, as a page number takes as long to arrive as
      scales of tile n+1 ── cp.async ──▶ shared memory [blocks, BN]      the scale that it leads to
      tile n ── × scale, rounded once ──▶ ring of 16 bits

They are requested behind the conversion of the tile before, so they have the time of a tile of the other operand.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.core import base_value

from ...pieces.scales import OfTokens, by_token, has_token_scale
from .. import config as sizes

WARPS = gl.constexpr(sizes.CONVERT.warps)


@gluon.jit
def make_scales(config: gl.constexpr):
    """Shared memory of the scales of a tile of keys and of one of values, () where tokens have none."""
    return OfTokens(slot_of(config, "k"), slot_of(config, "v"))


@gluon.jit
def slot_of(config: gl.constexpr, operand: gl.constexpr):
    """[blocks, BN] fp32."""
    if not has_token_scale(config, operand):
        return ()
    else:
        shape: gl.constexpr = [config.scale_blocks(operand), config.BN]
        return gl.allocate_shared_memory(gl.float32, shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.aggregate
class NextScales:
    """The tile whose scales are requested next, by its number in the run, and the pages of its keys."""

    number: gl.tensor
    pages: base_value  # [BN], () where there are no pages


@gluon.jit
def first_scales(ctx, operand: gl.constexpr):
    """Requests the scales of the first tile of "k" or "v"; () where its tokens have none."""
    if not has_token_scale(ctx.config, operand):
        return ()
    else:
        number = gl.to_tensor(0)
        return request_scales(ctx, NextScales(number, pages_of(ctx, number)), operand)


@gluon.jit
def request_scales(ctx, following, operand: gl.constexpr):
    """Requests the scales of the next tile, if there is one, and reads the pages of the one after."""
    config: gl.constexpr = ctx.config
    slot = ctx.token_scales.k if operand == "k" else ctx.token_scales.v
    rows = ctx.scales.k if operand == "k" else ctx.scales.v
    end = ctx.work.seq_k if operand == "k" else values_end(ctx)
    key = keys_of(ctx, following.number)
    places = scale_places(ctx, rows, key, following.pages)
    inside = (key < end) & (following.number < ctx.run.total)
    blocks: gl.constexpr = config.scale_blocks(operand)
    for block in gl.static_range(blocks):
        if block > 0:
            places += rows.block
        async_copy.async_load(slot.index(block), places, mask=inside)
    async_copy.commit_group()
    number = following.number + 1
    return NextScales(number, pages_of(ctx, number))


@gluon.jit
def finish_scales(config: gl.constexpr):
    """Wait for the requests behind the last tiles, which read nothing."""
    if by_token(config):
        async_copy.wait_group(0)


@gluon.jit
def values_end(ctx):
    """The keys whose values a query tile sees: values past them are zeros, and their scales may be no numbers."""
    if ctx.traits.paged:
        return ctx.tensors.v.table.length
    else:
        return ctx.tensors.v.length


@gluon.jit
def keys_of(ctx, number):
    """Keys [BN] of a tile of the run, of the last one for numbers beyond."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    first = ctx.run.key_tile(gl.minimum(number, ctx.run.total - 1)) * ctx.config.BN
    return first + gl.arange(0, ctx.config.BN, layout)


@gluon.jit
def pages_of(ctx, number):
    """Pages [BN] of the keys of a tile of the run."""
    if ctx.traits.paged:
        return ctx.tensors.k.table.page(keys_of(ctx, number))
    else:
        return ()


@gluon.jit
def scale_places(ctx, rows, key, pages):
    """Pointers [BN] to the first scale of each key."""
    head = rows.scale + ctx.work.kv_head * rows.head
    if ctx.traits.paged:
        return head + pages.to(gl.int64) * rows.outer + (key % ctx.config.page_size) * rows.row
    elif ctx.traits.kind == "ragged":
        return head + (ctx.tensors.k.start + key) * rows.row
    else:
        return head + ctx.tile.b * rows.outer + key * rows.row
