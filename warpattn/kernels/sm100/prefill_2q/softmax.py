"""Softmax warpgroup of the Blackwell kernel: 128 query rows, one a thread, from S to P and at the end from O to memory.

A thread loads its row of S (all of it stays in registers), so the row's maximum and sum need no other thread. P goes
back to tensor memory over S, in parts: what the tensor core needs first is released first.

      S ── load ─▶ score, mask ─▶ row maximum ─▶ scale of O to the correction warpgroup (if the reference moved)
                                        └──────▶ exp2 of 3/4 ─▶ P, signal ─▶ exp2 of 1/4 ─▶ P, signal ─▶ row sum

The reference maximum is lazy (see pieces/softmax.py). Weights of 8 bits are at most 2^8, as all others are: e4m3 ends
at 448. Their reference is 2^6 below the score that it is made of, so that small ones keep their bits down to 2^-12 of
a row's largest.

The exponential unit makes 16 results a clock and SM where the
tensor core wants 32, so a quarter of the elements take a polynomial instead (exp2.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import fma2, mul2
from triton.language.core import PropagateNan

from ...nvidia.opaque import hide_from_compiler
from ...pieces.modifiers import exponent_scale
from ...pieces.scales import LARGEST_IN_BYTES, block_scale, headroom_of, lowered, scaled_rows
from ...pieces.scheduler import Tile
from ...pieces.softmax import LARGEST, exponent, row_scale
from ..exp2 import exp2_polynomial, row_sum
from ..layouts import element_type, row_layout
from ..sync import await_signal, notify
from .context import p_tile, row_positions, with_scales
from .epilogue import store_output

ALL = gl.constexpr(PropagateNan.ALL)
LIFT = gl.constexpr(6.0)  # log2 of the weight in 8 bits of the score that a reference is made of
LOADING_COLUMNS = gl.constexpr(32)  # of scores at once, where a mask or a score loads from memory


@gluon.aggregate
class RowState:
    """Of 128 rows: the reference maximum (-inf while a row has seen no key) and the sum of exp2(c * (s - m))."""

    m: gl.tensor
    l: gl.tensor


@gluon.jit
def softmax_role(ctx, wg: gl.constexpr):
    """Does every key tile of a query tile, then its output."""
    if ctx.run.total > 0:
        scaled = with_scales(ctx, wg)
        state = row_state(ctx.config.MMA_M, row_layout())
        for n in range(ctx.run.total):
            state = softmax_tile(scaled, state, n, wg)
        await_signal(ctx.bars.o_producer.index(wg), (ctx.run.total - 1) & 1)
        store_output(scaled, state, wg)


@gluon.jit
def row_state(rows: gl.constexpr, layout: gl.constexpr):
    """The state of rows that have seen no key."""
    m = gl.full([rows], -float("inf"), gl.float32, layout)
    return RowState(m, gl.zeros_like(m))


@gluon.jit
def softmax_tile(ctx, state, n, wg: gl.constexpr):
    """Key tile number `n`: S to P."""
    config: gl.constexpr = ctx.config
    half: gl.constexpr = config.p_columns[0]
    quarter: gl.constexpr = config.p_columns[1]
    c = exponent_scale(ctx)
    scales = key_scales(ctx, n)
    await_signal(ctx.bars.s_producer.index(wg), n & 1)
    s0, s1, s2 = visible_scores(ctx, n, wg, scales)
    top = maximum_or_nan(row_max(s0), maximum_or_nan(row_max(s1), row_max(s2)))
    m, alpha = reference(ctx, state.m, top, c)
    send_scale(ctx, alpha, n, wg)

    c = row_scale(m, c, largest_exponent(config))
    mc = exponent(m, c)
    p = p_tile(ctx.memory, wg, config)
    dtype: gl.constexpr = element_type(config.weights)
    p0 = gl.exp2(exponents(s0, c, mc))
    p.slice(0, half).store(p0.to(dtype))
    p1 = exp2_polynomial(exponents(s1, c, mc))
    p.slice(half, quarter).store(p1.to(dtype))
    notify(ctx, ctx.bars.s_consumer.index(2 * wg))
    p2 = gl.exp2(exponents(s2, c, mc))
    p.slice(half + quarter, quarter).store(p2.to(dtype))
    notify(ctx, ctx.bars.s_consumer.index(2 * wg + 1))
    l = state.l * alpha + (row_sum(p0) + (row_sum(p1) + row_sum(p2)))
    return RowState(m, l)


@gluon.jit
def reference(ctx, m, top, c):
    """(new reference, scale of what was accumulated): it moves only when a row of the warp exceeds it by 2^8 (2^5 with
    an LSE, see pieces/softmax.py), or is NaN, which the polynomial would lose."""
    config: gl.constexpr = ctx.config
    alpha = gl.full_like(m, 1.0)
    x = row_scale(m, c, largest_exponent(config))
    if exceeded(ctx, m, top, x):
        higher = gl.maximum(m, lowered(top, c, LIFT if config.products else 0.0), propagate_nan=ALL)
        x = row_scale(higher, c, largest_exponent(config))
        alpha = gl.exp2(m * x - exponent(higher, x))
        m = higher
    return m, alpha


@gluon.jit
def exceeded(ctx, m, top, x):
    """Whether a row of the warp has a score that exceeds its reference by too much. For weights of 8 bits as they will
    be computed: large exponents are rounded."""
    if ctx.config.products:
        first = m == -float("inf")
        excess = gl.fma(top, x, -exponent(m, x))
        return warp_any(gl.where(first, top, excess), gl.where(first, m, headroom_of(False)))
    else:
        return warp_any(top * x, m * x + headroom_of(ctx.traits.has_lse))


@gluon.constexpr_function
def largest_exponent(config):
    """Up to which the softmax scale is taken as it is, see `row_scale`."""
    return LARGEST_IN_BYTES.value if config.products else LARGEST.value


@gluon.jit
def send_scale(ctx, alpha, n, wg: gl.constexpr):
    """Give the correction warpgroup the scale of each row of O; there is no O before the second key tile."""
    await_signal(ctx.bars.c_consumer.index(wg), n & 1, pred=n > 1)
    ctx.memory.scales.index(wg).store(alpha)
    notify(ctx, ctx.bars.c_producer.index(wg), n > 0)


@gluon.jit
def visible_scores(ctx, n, wg: gl.constexpr, scales):
    """S in three parts [128, N/2], [128, N/4], [128, N/4] times the `scales` of their keys, after the score function
    and, in a masked tile, the mask."""
    config: gl.constexpr = ctx.config
    half: gl.constexpr = config.p_columns[0]
    quarter: gl.constexpr = config.p_columns[1]
    s = ctx.memory.s.index(wg)
    key = ctx.run.key_tile(n) * config.BN
    s0 = visible_part(ctx, scaled_part(s.slice(0, half).load(), scales, 0), n, key, wg)
    s1 = visible_part(ctx, scaled_part(s.slice(half, quarter).load(), scales, 1), n, key + half, wg)
    s2 = visible_part(ctx, scaled_part(s.slice(half + quarter, quarter).load(), scales, 1), n, key + half + quarter, wg)
    return s0, s1, s2


@gluon.jit
def key_scales(ctx, n):
    """The scales of both halves of key tile number `n`, where blocks of keys have some: () elsewhere. They are loaded
    before the scores are there."""
    rows: gl.constexpr = scaled_rows(ctx.config, "k") if ctx.config.products else 0
    if rows == 0:
        return ()
    else:
        first = ctx.run.key_tile(n) * ctx.config.BN
        second = gl.minimum(first + ctx.config.p_columns[0], ctx.work.seq_k - 1)
        b, head = ctx.tile.b, ctx.work.kv_head
        return block_scale(ctx.scales.k, b, first // rows, head), block_scale(ctx.scales.k, b, second // rows, head)


@gluon.jit
def scaled_part(s, scales, half: gl.constexpr):
    """Scores of one half of a key tile times the scale of its keys."""
    if len(scales) == 0:
        return s
    else:
        return mul2(s, scales[half])


@gluon.jit
def visible_part(ctx, s, n, key, wg: gl.constexpr):
    """A part of key tile number `n` whose first column is key number `key`.

    Part by part, each behind a branch of its own: score and mask of a whole row at once need more registers than there
    are (ALiBi at head dim 128: 185 stores and 316 loads of spilled ones). Functions that load take fewer columns.
    """
    width: gl.constexpr = s.shape[1]
    loads: gl.constexpr = len(ctx.mods.mask_args) + len(ctx.mods.score_args) > 0
    if loads and width > LOADING_COLUMNS:
        left, right = s.reshape([s.shape[0], 2, width // 2]).permute((0, 2, 1)).split()
        left = visible_part(ctx, left, n, key, wg)
        right = visible_part(ctx, right, n, key + width // 2, wg)
        joined = gl.join(left, right).permute((0, 2, 1)).reshape(s.shape)
        return gl.convert_layout(joined, s.type.layout, assert_trivial=True)
    else:
        if loads:
            # else LLVM keeps the address of every column that the mask reads: 182 stores and 189 loads of registers
            key = hide_from_compiler(key)
        if ctx.mods.score is not None:
            s = score(ctx, s, key, wg)
        if n < ctx.run.masked:
            s = mask(ctx, s, key, wg)
        return s


@gluon.jit
def score(ctx, s, key, wg: gl.constexpr):
    """The score function on products [128, W] whose first column is key number `key`."""
    tile, q, k = indices(ctx, s, key, wg)
    scale = ctx.scale
    if ctx.config.row_scales:
        scale = gl.convert_layout(scale, gl.SliceLayout(1, s.type.layout), assert_trivial=True)[:, None]
    return ctx.mods.apply_score(s, scale, tile, ctx.work, q, k)


@gluon.jit
def mask(ctx, s, key, wg: gl.constexpr):
    """Scores [128, W] with hidden keys, and those past the end, at -inf."""
    tile, q, k = indices(ctx, s, key, wg)
    s = ctx.mods.apply_mask(s, tile, ctx.work, q, k)
    if key + s.shape[1] > ctx.work.seq_k:
        s = gl.where(k < ctx.work.seq_k, s, -float("inf"))
    return s


@gluon.jit
def indices(ctx, s, key, wg: gl.constexpr):
    """(tile, q [128, 1], k [1, W]) of scores [128, W]: heads and positions of the rows, numbers of the keys.

    With fused heads row r is query r // group of head r % group, and the tile's head is a column of numbers.
    """
    config: gl.constexpr = ctx.config
    layout: gl.constexpr = s.type.layout
    rows = gl.arange(0, config.MMA_M, gl.SliceLayout(1, layout))[:, None]
    k = key + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))[None, :]
    queries, heads = row_positions(ctx, rows, wg)
    return Tile(ctx.tile.b, heads, ctx.tile.row), queries + ctx.work.seq_k - ctx.work.seq_q, k


@gluon.jit
def exponents(s, c, mc):
    """c * s - mc, two elements an instruction; `c` and `mc` are one value a row."""
    layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    mc = gl.convert_layout(mc, layout, assert_trivial=True)
    c = gl.convert_layout(c, layout, assert_trivial=True)
    return fma2(s, gl.full_like(s, 1.0) * c[:, None], (gl.zeros_like(mc) - mc)[:, None])


@gluon.jit
def row_max(s):
    """[128, W] -> [128], all of it in one thread; NaN if one of them is."""
    return gl.convert_layout(gl.reduce(s, 1, maximum_or_nan), row_layout(), assert_trivial=True)


@gluon.jit
def maximum_or_nan(a, b):
    return gl.maximum(a, b, propagate_nan=ALL)


@gluon.jit
def warp_any(x, bound):
    """Whether any x of this warp, of which a thread has one, exceeds its bound or is NaN; a branch on it must stay
    inside the warp."""
    return gl.inline_asm(_VOTE, "=r,f,f", [x, bound], gl.int32) != 0


_VOTE = gl.constexpr(
    "{ .reg .pred a, b; setp.gtu.f32 a, $1, $2; vote.sync.any.pred b, a, 0xffffffff; selp.b32 $0, 1, 0, b; }"
)
