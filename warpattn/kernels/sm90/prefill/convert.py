"""8-bit keys and values in prefill: a warpgroup makes 16-bit tiles of them in the slots where they arrive.

      load ── TMA ──▶ [ 8 bits | free  ] ── convert: LDS, F2FP, STS ──▶ [ 16 bits, swizzled ] ──▶ attend
                        slot of K or V        registers                    the same slot

wgmma reads values from shared memory only, and of 16 bits only if their rows are keys, so each tile is written there
once more. A slot has room for both forms one after the other: all of the 8-bit tile is in registers before the first
16-bit element is written, and rings stay as deep as those of 16 bits.

Operands have the dtype of the queries, which holds every e4m3 and e5m2 value. Scales per tensor and head become part of
the softmax scale and of the output's factor. Where tokens have scales, the role brings those of keys and values with a
key tile: the scores' columns are multiplied by the ones, their weights, before they are rounded, by the others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...nvidia.pipelines import consumer_state
from ...pieces.softmax import as_quads, from_quads
from ..columns import as_matrices
from ..layouts import accumulator_layout
from .context import CONVERTING

LEAST_SCALE = gl.constexpr(2.0**-100)  # of scores: a smaller product of two scales makes exponents of 0 times infinity


@gluon.jit
def convert_role(ctx):
    """Convert the tiles of every output tile, in the order in which they are loaded."""
    config: gl.constexpr = ctx.config
    q_state = consumer_state(config.q_stages)
    k_state = consumer_state(config.kv_stages)
    v_state = consumer_state(config.kv_stages)
    tile = published(ctx, q_state)
    while tile.row >= 0:
        span = ctx.work.key_tiles(ctx.mods, tile, config)
        ctx.rings.q.consumer_release(q_state)
        k_state = convert_keys(ctx, k_state, tile, span.key_tile(0))
        for i in range(1, span.total):
            k_state = convert_keys(ctx, k_state, tile, span.key_tile(i))
            v_state = convert(ctx.rings.v_in, v_state)
        v_state = convert(ctx.rings.v_in, v_state)
        q_state = q_state.step()
        tile = published(ctx, q_state)


@gluon.jit
def published(ctx, q_state):
    """The tile of a slot of the Q ring, when it is there."""
    ctx.rings.q.consumer_wait(q_state)
    return ctx.work.read(ctx.rings.tiles, q_state.index)


@gluon.jit
def convert_keys(ctx, state, tile, key_tile):
    """A tile of keys, and the scales of its keys and values where tokens have some."""
    if by_token(ctx.config):
        ctx.rings.k_in.wait(state)
        for i in gl.static_range(2):
            token_scales(ctx, state, tile, key_tile, i)
    return convert(ctx.rings.k_in, state)


@gluon.jit
def convert(slots, state):
    """The next tile of a ring, when it has arrived, in 16 bits."""
    config: gl.constexpr = slots.config
    slots.wait(state)
    widths: gl.constexpr = config.parts[slots.number]
    narrow = as_matrices(slots.tile(state), config.block_n, widths)
    wide = as_matrices(slots.ring.tile(state), config.block_n, widths)
    for part in gl.static_range(len(wide)):
        convert_part(narrow[part], wide[part], widths[part], config)
    fence_async_shared()
    slots.ring.producer_commit(state)
    return state.step()


@gluon.jit
def convert_part(narrow, wide, cols: gl.constexpr, config: gl.constexpr):
    """The 8-bit elements of a part [N, columns] over themselves, in 16 bits."""
    lanes: gl.constexpr = cols // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [CONVERTING, 1], [1, 0])
    x = narrow.load(layout).to(gl.float16)
    if config.element.name == "bf16":
        x = x.to(gl.float32).to(gl.bfloat16)
    wide.store(x)


@gluon.constexpr_function
def by_token(config):
    """Whether tokens have scales of their own."""
    return config.eight_bit is not None and config.eight_bit.by_token


@gluon.constexpr_function
def has_scale(config, i, *kinds):
    """Whether keys (0), values (1) or queries (2) have a scale of one of these kinds."""
    return config.eight_bit is not None and config.eight_bit.scales[i] in kinds


@gluon.jit
def token_scales(ctx, state, tile, key_tile, i: gl.constexpr):
    """Scales of the keys (0) or values (1) of a key tile into their slot: 1 past the end."""
    config: gl.constexpr = ctx.config
    if has_scale(config, i, "token"):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [CONVERTING], [0])
        rows = ctx.scales.v if i else ctx.scales.k
        key = key_tile * config.block_n + gl.arange(0, config.block_n, layout)
        outer, row = ctx.tensors.k.place(ctx, tile, key)
        head = (tile.h // ctx.work.group).to(gl.int64) * rows.head
        at = gl.to_tensor(outer).to(gl.int64) * rows.outer + row.to(gl.int64) * rows.row + head
        scale = gl.load(rows.scale + at, mask=key < ctx.work.lengths(tile).seq_k, other=1.0)
        ctx.rings.scales[i].index(state.index).store(scale)


@gluon.jit
def softmax_scale(scale, config: gl.constexpr):
    """The softmax scale of a kernel's argument `scale`."""
    if config.eight_bit is None:
        return scale
    else:
        return scale.scores


@gluon.jit
def head_scale(ctx, tile, i: gl.constexpr):
    """The scale of all keys (0), values (1) or queries (2) of a tile."""
    if i == 2:
        return gl.load(ctx.scales.q.scale + tile.h * ctx.scales.q.head)
    else:
        rows = ctx.scales.v if i else ctx.scales.k
        return gl.load(rows.scale + tile.h // ctx.work.group * rows.head)


@gluon.jit
def of_tile(ctx, tile):
    """The context with the scales of a tile's keys and queries as part of the softmax scale."""
    for i in gl.static_range(0, 4, 2):
        if has_scale(ctx.config, i, "tensor", "head"):
            scale = ctx.scale * head_scale(ctx, tile, i)
            if ctx.mods.score is None:  # a scale of 0 or below comes with a score function
                scale = gl.maximum(scale, LEAST_SCALE)
            ctx = ctx.with_scale(scale)
    return ctx


@gluon.jit
def scaled_factor(ctx, factor, tile):
    """The factor of a tile's output, times the scale of its values."""
    if has_scale(ctx.config, 1, "tensor", "head"):
        return factor * head_scale(ctx, tile, 1)
    else:
        return factor


@gluon.jit
def scaled_scores(ctx, s, k_state):
    """Scores [64, N] times their keys' scales, where tokens have some."""
    if has_scale(ctx.config, 0, "token"):
        return s * slot_scales(ctx, k_state, 0)
    else:
        return s


@gluon.jit
def scaled_weights(ctx, p, s, k_state):
    """Weights [64, N/8, 4, 2] times their values' scales, where tokens have some; `s` [64, N]."""
    if has_scale(ctx.config, 1, "token"):
        return as_quads(from_quads(p, s) * slot_scales(ctx, k_state, 1))
    else:
        return p


@gluon.jit
def slot_scales(ctx, k_state, i: gl.constexpr):
    """Scales [1, N] of the keys (0) or values (1) of a slot."""
    layout: gl.constexpr = gl.SliceLayout(0, accumulator_layout(ctx.config.block_n))
    return ctx.rings.scales[i].index(k_state.index).load(layout)[None, :]


@gluon.jit
def release_keys(ctx, k_state, before: gl.constexpr):
    """Release a slot of keys `before` the softmax, or, if it holds scales, after it."""
    if by_token(ctx.config) != before:
        ctx.rings.k.consumer_release(k_state)
