"""Online softmax in base 2 over tiles of scores, and its normalisation.

The state of a row is a reference maximum `m` (unscaled scores) and a sum `l`; c = scale * log2(e) turns a score into
a base-2 exponent, so that p = exp2(c * s - c * m) is one fused multiply-add and one exponential.

Three things keep the work beside the tensor core short. The reference is lazy: it moves only if weights sum to more
than 2^15, up to which fp16 holds them, so the accumulator is almost never rescaled (FlashAttention-4, arXiv 2603.05451,
has a bound of 2^8). It moves only in the rows that exceed it, so a row's bits do not depend on the rest of its warp. No
maximum is computed unless it moves: the sum is needed anyway. And rows are not reduced across lanes. An accumulator
spreads a row over a quad of four lanes, columns 8 j + 2 lane + {0, 1}, so an [M, N] tile is viewed as [M, N/8, 4, 2],
and the state is [M, 4], one value a lane: `m` is equal in the four, `l` is summed over them once at the end.

With an LSE, which training needs, the bound is lower: the rounded weight of a key that dominates a row would spoil the
gradient of q. Where the reference moves to this key, its weight is 1, which is not rounded (docs/training.md).

A card multiplies and subtracts in one step, so where |c * m| is large, weights would be lost in its rounding. There a
`row_scale` replaces c.

A NaN among a row's scores makes one of its p, and so its sum, factor and LSE NaN; the maximum need not propagate it.
Where registers do not hold scores beside weights, or scores have any size, Hopper's use sm90/softmax_steps.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
MOST = gl.constexpr(32768.0)  # sum of a lane's weights up to which none exceeds fp16
MOST_WITH_LSE = gl.constexpr(64.0)  # a lane has up to 32 weights of a tile
LARGEST = gl.constexpr(134217728.0)  # up to |c * m| = 2^27 its rounding error is at most 4, so p stays within fp16
LOWEST = gl.constexpr(-3.4028234663852886e38)  # the lowest finite number


@gluon.aggregate
class SoftmaxState:
    m: gl.tensor  # [M, 4] reference maximum, -inf while a row has seen no key
    l: gl.tensor  # [M, 4] this lane's part of the row sum of exp2(c * (s - m))
    guard: gl.base_value  # against large c * m: the `row_scale`s [M, 4]; other steps keep something else


@gluon.jit
def softmax_start(s, c):
    """First tile: (state, p) of scores `s` [M, N]. Hidden ones are -inf, perhaps whole rows."""
    quads = as_quads(s)
    m = quad_max(lane_max(quads))
    factor = row_scale(m, c)
    p = weights(quads, m, factor)
    return SoftmaxState(m, lane_sum(p), factor), p


@gluon.jit
def softmax_step(state, s, c, dtype: gl.constexpr, has_lse: gl.constexpr, move_all):
    """Next tile: (state, p packed to 16-bit `dtype`, moved, alpha). If `moved`, the caller multiplies its accumulator
    by `alpha` [M, 4]. Then p is computed twice, so registers hold `s` beside it. `move_all`: all
    references rise to their maxima, because most would have to; then p is computed once."""
    most: gl.constexpr = MOST_WITH_LSE if has_lse else MOST
    quads = as_quads(s)
    m, factor = state.m, state.guard
    alpha = gl.full_like(m, 1.0)
    l, p = gl.zeros_like(m), pack(gl.zeros_like(quads), dtype)
    moved = move_all
    if not move_all:
        l, p = summed_weights(quads, m, factor, dtype)
        moved = warp_any(l, gl.full_like(l, most))
    if moved:
        top = quad_max(lane_max(quads))
        rises = (quad_max(l) > most) | (move_all & (top > m))
        m = gl.where(rises, gl.maximum(m, top), m)
        factor = row_scale(m, c)
        alpha = gl.where(rises, gl.exp2(exponent(state.m, factor) - exponent(m, factor)), 1.0)
        l, p = summed_weights(quads, m, factor, dtype)
    return SoftmaxState(m, state.l * alpha + l, factor), p, moved, alpha


@gluon.jit
def summed_weights(quads, m, factor, dtype: gl.constexpr):
    """(each lane's sum, packed p) of `weights`."""
    p = weights(quads, m, factor)
    return lane_sum(p), pack(p, dtype)


@gluon.jit
def weights(quads, m, factor):
    """p of scores in quads, for references `m` and factors from scores to exponents, both [M, 4]."""
    return gl.exp2(quads * factor[:, None, :, None] - exponent(m, factor)[:, None, :, None])


@gluon.jit
def row_scale(m, c, largest: gl.constexpr = LARGEST):
    """The factor from a row's scores to exponents: c, or, where |c * m| is `largest` or more, the power of two at or
    below c, which multiplies exactly. Such exponents differ by at least 8 in their last bit anyway (2 for bytes)."""
    kept = gl.where(gl.abs(m * c) < largest, -1, 0x7F800000)
    return (gl.to_tensor(c).to(gl.int32, bitcast=True) & kept).to(gl.float32, bitcast=True)


@gluon.jit
def rescale(o, alpha):
    """Multiplies O [M, D] by alpha [M, 4]."""
    quads = as_quads(o)
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, quads.type.layout))
    alpha = gl.convert_layout(alpha, layout, assert_trivial=True)
    return from_quads(quads * alpha[:, None, :, None], o)


@gluon.aggregate
class Denominator:
    """A row's sum of e^score, as e^m * l, because for large m its logarithm has no digits left for l."""

    m: gl.tensor  # finite, `LOWEST` of rows without a key
    l: gl.tensor  # 0 of rows without a key, NaN of rows with a NaN or an infinity

    @gluon.jit
    def lse(self):
        """The natural logarithm."""
        return gl.where(self.l != 0, self.m + gl.log2(self.l) * LN_2, -float("inf"))

    @gluon.jit
    def packed(self):
        """Packs both numbers into 64 bits, as partial outputs are stored with them."""
        low = self.l.to(gl.uint32, bitcast=True).to(gl.int64)
        return (self.m.to(gl.int32, bitcast=True).to(gl.int64) << 32) | low


@gluon.jit
def softmax_finish(state, scale, sink=0.0, has_sink: gl.constexpr = False):
    """(factor [M, 4], `Denominator` [M, 4]) of a state, see `finish_rows`."""
    l = gl.sum(state.l, 1, keep_dims=True) + gl.zeros_like(state.l)
    return finish_rows(state.m, l, scale, l != 0, sink, has_sink)


@gluon.jit
def finish_rows(m, l, scale, some, sink=0.0, has_sink: gl.constexpr = False):
    """(factor, `Denominator`) of rows, any shape; the caller multiplies the accumulator by the factor.

    `m` is a row's reference maximum and `l` its sum; `scale` turns m into natural units; `some` says whether the row
    has seen a key. `sink` is a logit in natural units that joins the denominator once. Rows without any key get
    factor 0, whatever their (finite) `l` is.
    """
    top = gl.maximum(m * scale, LOWEST)
    if has_sink:
        peak = gl.where(some, gl.maximum(top, sink), gl.maximum(sink, LOWEST))
        shift = gl.where(some, gl.exp2((top - peak) * LOG2_E), 0.0)
        total = gl.where(some, l * shift, 0.0) + gl.exp2((sink - peak) * LOG2_E)
        return gl.where(some, shift / total, total * 0.0), Denominator(peak, total)
    else:
        return gl.where(some, 1.0 / l, 0.0), Denominator(gl.where(some, top, LOWEST), gl.where(some, l, 0.0))


@gluon.jit
def exponent(m, x):
    """x * m, but finite where no key has been seen (m is -inf), so that exp2(-inf - x * m) is 0 and not NaN."""
    return gl.maximum(m * x, LOWEST)


@gluon.jit
def as_quads(x):
    """[M, N] accumulator as [M, N/8, 4, 2]; no data moves."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def from_quads(x, like):
    """[M, N/8, 4, 2] back to the [M, N] layout of `like`."""
    return gl.convert_layout(x.reshape(like.shape), like.type.layout, assert_trivial=True)


@gluon.jit
def pack(quads, dtype: gl.constexpr):
    """fp32 [M, N/8, 4, 2] rounded to pairs of `dtype` in one int32 register each: [M, N/8, 4]."""
    return pack_pairs(*quads.split(), dtype)


@gluon.jit
def pack_pairs(even, odd, dtype: gl.constexpr):
    """Pairs of fp32 rounded to `dtype`, in one int32 register each."""
    asm: gl.constexpr = _PACK_BF16 if dtype == gl.bfloat16 else _PACK_FP16
    return gl.inline_asm_elementwise(asm, "=r,f,f", [odd, even], gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(pairs, dtype: gl.constexpr):
    """[M, N/8, 4] pairs as an [M, N] tensor of `dtype`; it compiles to no instruction."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), is_pure=True, pack=1
    )
    values = gl.join(even.to(dtype, bitcast=True), odd.to(dtype, bitcast=True))
    return values.reshape([pairs.shape[0], pairs.shape[1] * 8])


@gluon.jit
def lane_max(quads):
    """[M, N/8, 4, 2] -> [M, 4]: the largest element of each lane's part of a row."""
    return gl.max(gl.max(quads, 3), 1)


@gluon.jit
def lane_sum(quads):
    """[M, N/8, 4, 2] -> [M, 4]: the sum of each lane's part of a row."""
    return gl.sum(gl.sum(quads, 3), 1)


@gluon.jit
def quad_max(x):
    """[M, 4] -> [M, 4]: the row's largest in every lane."""
    return gl.max(x, 1, keep_dims=True) + gl.zeros_like(x)


@gluon.jit
def warp_any(x, bound):
    """Whether any x [M, 4] of this warp, of which a thread has two, exceeds its bound. Warps may get different answers,
    so a branch on it must stay inside the warp."""
    return gl.inline_asm(_VOTE_2, "=r,f,f,f,f", [x, bound], gl.int32) != 0


_PACK_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $2;")
_PACK_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $1, $2;")
_VOTE_2 = gl.constexpr(
    "{ .reg .pred a, b;"
    " setp.gt.f32 a, $1, $3; setp.gt.or.f32 a, $2, $4, a;"
    " vote.sync.any.pred b, a, 0xffffffff; selp.b32 $0, 1, 0, b; }"
)
