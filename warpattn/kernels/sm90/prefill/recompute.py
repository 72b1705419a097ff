"""Computes again the tiles that nonfinite.py listed, in one warpgroup, after all roles have ended.

The rings are free then, so it loads one tile at a time into their first slots, without overlap: almost no launch gets
here. V tiles with finite values are multiplied as usual; others are added key by key, to the rows that see the key:

      V tile ─▶ all finite? ── yes ─▶ O += P·V
                      └── no ─▶ for each key: O += p · v in the rows that see it

It computes O in blocks of columns, and the scores again for each block. With all columns at once the compiler spilled
even in the loops of the roles (30 % of the time at head dim 256, H200). For the same reason it hides the numbers of
slots and barriers from the compiler, which would keep their addresses in registers across those loops.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...nvidia.finite import any_nonfinite
from ...nvidia.opaque import hide_from_compiler
from ...nvidia.pipelines import PipelineState, StagedPipeline
from ...pieces.modifiers import exponent_scale
from ...pieces.softmax import SoftmaxState, as_quads, from_quads, lane_sum, rescale, unpack
from ..column_slices import place_in
from ..columns import as_matrices
from ..layouts import accumulator_layout, element_type, operand_layout
from ..partial_rows import used_rows
from ..softmax_steps import limit, weights_first
from .attend import multiplied_keys, multiplied_queries, start_scores, step_softmax, visible_scores
from .config import RECOMPUTE_BARRIERS
from .context import output_type
from .eight_bit.convert import convert_alone
from .eight_bit.rings import FreeNarrowRing, arriving_queries
from .eight_bit.scales import key_block_scales, of_tile, scaled_factor, scaled_scores, scaled_weights
from .eight_bit.transpose_values import in_operand_order
from .eight_bit.weights import pack_bytes, unpack_bytes
from .epilogue import finish
from .nonfinite import peek
from .packed_rows import mask_heads, row_tokens

BARRIERS = gl.constexpr(RECOMPUTE_BARRIERS)
SLOTS = gl.constexpr(RECOMPUTE_BARRIERS // 2)
Q = gl.constexpr(2)  # number of the queries' full barrier; K has slot and barrier 0, V 1


class RecomputedBlock(NamedTuple):
    """A block of output columns that is computed at a time."""

    part: int  # part of the values
    first: int  # first column in that part
    stage: int  # part of the staging tile
    at: int  # first column there
    stored: int  # output column to which the staging tile is stored after this block; -1: not yet


@gluon.constexpr_function
def recomputed_bytes(config):
    """Bytes of one warpgroup's queries and output, which are loaded first."""
    return (config.loaded_q_bytes + config.out_bytes // config.rows * used_rows(config)) // config.consumers


@gluon.constexpr_function
def recomputed_cols(config):
    """Columns of a block. Narrow blocks need few registers, which leaves more to the roles."""
    return min(config.v_parts[-1], config.store_parts[-1], 64 if config.padded_v > 64 else 32)


@gluon.constexpr_function
def recomputed_blocks(config):
    """All columns of the output, as `RecomputedBlock`s."""
    cols, whole, blocks = recomputed_cols(config), sum(config.store_parts), []
    for column in range(0, config.columns_v, cols):
        (part, first), (stage, at) = place_in(config.v_parts, column), place_in(config.store_parts, column % whole)
        last = (column + cols) % whole == 0 or column + cols >= config.columns_v
        blocks.append(RecomputedBlock(part, first, stage, at, column // whole * whole if last else -1))
    return tuple(blocks)


@gluon.constexpr_function
def recomputed_block(config, number):
    """One of `recomputed_blocks`."""
    return recomputed_blocks(config)[number]


@gluon.aggregate
class LeftTile:
    """A warpgroup's rows of a tile that is computed again."""

    tile: gl.base_value  # Tile or VarlenTile
    slot: PipelineState  # slot 0, of its queries and of K and V tiles
    wg: gl.tensor
    q: gl.tuple  # [64, D]
    out: gl.tuple  # [1, 64 / packed, packed, Dv]


@gluon.aggregate
class VisitedKeys:
    """The current key tile."""

    span: gl.base_value
    i: gl.tensor  # its number in the span
    tile: gl.tensor  # its number in the sequence


@gluon.jit
def end_role(ctx, wg):
    """Ends a consumer warpgroup: if it has listed tiles, waits until their outputs are in memory, where
    `recompute_tile` reads them."""
    if peek(ctx.rings.left.index(wg)) >= 0:
        tma.store_wait(0, read_only=False)


@gluon.jit
def recompute_tiles(ctx):
    """Computes every listed tile again; does nothing if all lists are empty.

    The compiler hoists some 70 instructions out of the loops over tiles. This branch keeps launches without listed
    tiles from fetching them, line by line, at their end.
    """
    last = peek(ctx.rings.left.index(0))
    consumers: gl.constexpr = ctx.config.consumers
    for wg in gl.static_range(1, consumers):
        last = gl.maximum(last, peek(ctx.rings.left.index(wg)))
    if last >= 0:
        recompute_lists(ctx)


@gluon.jit
def recompute_lists(ctx):
    """Computes the tiles of every warpgroup's list again."""
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for wg in range(ctx.config.consumers):
        place = peek(ctx.rings.left.index(wg))
        while place >= 0:
            if turn == 0:
                start_barriers(ctx.rings.recompute)
            place, phase = recompute_tile(ctx, place, wg, phase, turn & 1)
            turn += 1


@gluon.jit
def start_barriers(bars):
    """Initialises the barriers; each completes on one arrival."""
    for i in gl.static_range(BARRIERS):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()  # TMA sees the new barriers
    gl.barrier()


@gluon.jit
def recompute_tile(ctx, place, wg, phase, turn):
    """Computes a warpgroup's rows of a tile again. Returns (next place in the list, phase)."""
    config: gl.constexpr = ctx.config
    tile = ctx.work.tile_at(place, config.tokens)
    row = tile.row + wg * config.wg_tokens
    here = hide_from_compiler(0)
    q, out, full = ctx.rings.q.smem.index(here), ctx.rings.out.index(wg), ctx.rings.recompute.index(here + Q)
    mbarrier.expect(full, recomputed_bytes(config))
    ctx.tensors.load_queries(tile, row, full, arriving_queries(q, config))
    ctx.tensors.load_output(tile, row, full, out)
    mbarrier.wait(full, turn)
    before = peek(out[0])
    slot = PipelineState(here, gl.to_tensor(0), 1)
    queries = multiplied_queries(ctx, q, tile, slot, wg)
    left = LeftTile(tile, slot, wg, queries, out)
    scaled = of_tile(ctx, tile, slot, wg)
    blocks: gl.constexpr = len(recomputed_blocks(config))
    for block in range(blocks):
        o, phase = attend_block(scaled, left, block, phase)
        for i in gl.static_range(blocks):
            if block == i:
                store_block(ctx, o, left, recomputed_block(config, i))
    return before, phase


@gluon.jit
def attend_block(ctx, left, block, phase):
    """(O [64, C] of one block of output columns, phase)."""
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = accumulator_layout(recomputed_cols(config), config.depth)
    span = ctx.work.key_tiles(ctx.mods, left.tile, config)
    scored: gl.constexpr = accumulator_layout(config.block_n, config.depth)
    softmax = start_alone(ctx, gl.zeros([config.rows, config.block_n], gl.float32, scored))
    o = gl.zeros([config.rows, recomputed_cols(config)], gl.float32, layout)
    for i in range(span.total):
        visited = VisitedKeys(span, i, span.key_tile(i))
        s = scores(ctx, left, visited, phase)
        softmax, p, moved, alpha = step_softmax(ctx, softmax, s, False)
        if moved:
            o = rescale(o, alpha)
        if weights_first(config, ctx.mods.score):
            p = gl.convert_layout(unpack(p, element_type(config.weights)).to(gl.float32), s.type.layout, True)
        else:
            p = from_quads(scaled_weights(ctx, p, s, left.slot), s)
        o = add_values(ctx, left, o, p, visited, block, phase)
        phase ^= 1
    factor, _ = finish(ctx, softmax, left.tile)
    return rescale(o, scaled_factor(ctx, factor, left.tile)), phase


@gluon.jit
def store_block(ctx, o, left, block: gl.constexpr):
    """Writes a `RecomputedBlock` of O to the staging tile, and stores that by TMA once it is full."""
    config: gl.constexpr = ctx.config
    staging = as_matrices(left.out, config.rows, config.store_parts)[block.stage]
    staging.slice(block.at, recomputed_cols(config), 1).store(o.to(output_type(config)))
    if block.stored >= 0:
        fence_async_shared()
        gl.barrier()
        row = left.tile.row + left.wg * config.wg_tokens
        ctx.tensors.store_output(left.tile, row, block.stored, left.out)
        tma.store_wait(0)
        gl.barrier()


@gluon.jit
def start_alone(ctx, s):
    """The state of rows of zeros `s` that have seen no key, for `step_softmax`."""
    zero = lane_sum(as_quads(s))
    m = zero - float("inf")
    if ctx.mods.score is not None or ctx.config.products:
        return SoftmaxState(m, zero, ())
    elif weights_first(ctx.config, None):
        return SoftmaxState(m, zero, zero + exponent_scale(ctx))
    else:
        return SoftmaxState(m, zero, limit(False, ctx.has_lse))


@gluon.aggregate
class FreeSlots(StagedPipeline):
    """Slots of a ring that the roles no longer use, with the barriers of this file; one slot may serve all `state`s."""

    slots: gl.constexpr  # slots of the ring

    @gluon.jit
    def tile(self, state, part: gl.constexpr = 0):
        if self.slots == 1:
            return self.smem.index(0)
        else:
            return self.smem.index(state.index * self.parts + part)


@gluon.jit
def load(ctx, rows, ring, slot: gl.constexpr, left, visited, phase, nbytes: gl.constexpr):
    """Loads a tile of K or V, and waits for it."""
    config: gl.constexpr = ctx.config
    alone = FreeSlots(ring.smem, ctx.rings.recompute, SLOTS, 1, 1, ring.stages)
    number = hide_from_compiler(slot)
    state = PipelineState(number, gl.to_tensor(1), ring.stages)
    gl.barrier()  # all warps have read the slot's previous tile
    arriving = alone
    if config.converts:
        arriving = FreeNarrowRing(alone, config, slot)
    rows.load(ctx, arriving, state, left.tile, visited.tile, nbytes)
    mbarrier.wait(alone.full(number), phase)
    if config.converts:
        convert_alone(ctx, arriving, state, left.tile, visited.span, visited.i)
    return alone.tile(state)


@gluon.jit
def scores(ctx, left, visited, phase):
    """Loads a key tile; returns its scores [64, N], hidden ones -inf."""
    config: gl.constexpr = ctx.config
    keys = load(ctx, ctx.tensors.k, ctx.rings.k, 0, left, visited, phase, config.k_bytes // config.widening)
    s = start_scores(left.q, multiplied_keys(keys, config), config)
    s = warpgroup_mma_wait(0, deps=(s,))
    scales = key_block_scales(ctx, left.tile, visited.tile)
    s = scaled_scores(ctx, s, scales, left.slot, left.slot, left.wg)
    return visible_scores(ctx, s, left.tile, visited.tile, True, left.wg)


@gluon.jit
def add_values(ctx, left, o, p, visited, block, phase):
    """Adds P [64, N] times a column block of a V tile to O; values that are not finite only in rows that see them."""
    config: gl.constexpr = ctx.config
    values = load(ctx, ctx.tensors.v, ctx.rings.v, 1, left, visited, phase, config.v_bytes // config.widening)
    values = as_matrices(values, config.v_rows, config.v_columns)
    finite = all_finite(values)
    packed = left_operand(p, config)
    blocks: gl.constexpr = len(recomputed_blocks(config))
    for i in gl.static_range(blocks):
        if block == i:
            here: gl.constexpr = recomputed_block(config, i)
            if finite:
                o = warpgroup_mma(packed, right_operand(values[here.part], here.first, config), o)
            else:
                for j in range(config.block_n):
                    o = add_value(ctx, left, o, p, values[here.part], visited.tile, here.first, j)
    return o


@gluon.jit
def left_operand(p, config: gl.constexpr):
    """P [64, N] as the left operand of wgmma."""
    layout: gl.constexpr = operand_layout(recomputed_cols(config), config.depth)
    if config.products:
        packed = unpack_bytes(pack_bytes(as_quads(p)), element_type(config.element))
    else:
        packed = p.to(element_type(config.weights))
    return gl.convert_layout(packed, layout, assert_trivial=True)


@gluon.jit
def right_operand(values, first: gl.constexpr, config: gl.constexpr):
    """Columns from `first` on of a part of a V tile, as the right operand of wgmma."""
    if config.products:
        return values.slice(first, recomputed_cols(config), 0).permute((1, 0))
    else:
        return values.slice(first, recomputed_cols(config), 1)


@gluon.jit
def add_value(ctx, left, o, p, values, key_tile, first, j):
    """Adds row `j` of a V tile (columns from `first` on), times its weights in P [64, N], to O in the rows that see
    the key."""
    config: gl.constexpr = ctx.config
    rows: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    cols: gl.constexpr = gl.SliceLayout(0, o.type.layout)
    lengths = ctx.work.lengths(left.tile)
    offset = left.tile.row + left.wg * config.wg_tokens + lengths.seq_k - lengths.seq_q
    q = (offset + row_tokens(rows, config))[:, None]
    number = gl.arange(0, config.block_n, gl.SliceLayout(0, p.type.layout))[None, :]
    key = j
    if config.products:
        key = in_operand_order(j)
    weight = gl.sum(gl.where(number == key, p, 0.0), 1)
    weight = gl.convert_layout(weight, rows, assert_trivial=True)[:, None]
    if config.products:
        columns = (first + gl.arange(0, recomputed_cols(config), cols)) * config.block_n + j
    else:
        columns = j * values.shape[1] + first + gl.arange(0, recomputed_cols(config), cols)
    value = values.reshape([values.shape[0] * values.shape[1]]).gather(columns, 0).to(gl.float32)[None, :]
    k = key_tile * config.block_n + key
    seen = ctx.mods.keeps(mask_heads(left.tile, rows, config), lengths, q, k, (k, k, gl.to_tensor(0)))
    return gl.where(seen, o + weight * value, o)


@gluon.jit
def all_finite(tile):
    """Whether a tile [N, columns] in shared memory, given in parts, has no NaN and no infinity."""
    special = any_nonfinite(tile[0])
    for part in gl.static_range(1, len(tile)):
        special |= any_nonfinite(tile[part])
    return special == 0
