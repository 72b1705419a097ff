"""Merges attention over parts of the keys: outputs o_i with natural log-sum-exps l_i of the same rows.

      l = log Σ exp(l_i)        o = Σ exp(l_i - l) · o_i

A program takes a few rows, one head of one token each, and adds their states in order, as an online softmax does tiles:
the running maximum `top`, the sum of exponentials and the weighted outputs. A state that saw no key has l_i = -inf and
counts for nothing, whatever its output holds; NaN in one of the l_i stays, in the sum and with it in both results.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warpattn.kernels.cache.config import VECTOR

_VECTOR = gl.constexpr(VECTOR)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def merge_kernel(states, merged, limit, shape, config: gl.constexpr, lanes: gl.constexpr):
    """states: a `State` each. merged: the `State` to write. limit: int32*, tokens that count, of a single sequence;
    others are not written. shape: `MergeShape`. lanes: of a warp. Grid: blocks of `config.rows` rows."""
    width: gl.constexpr = 1 << (config.dim - 1).bit_length()
    size: gl.constexpr = merged.out.pointer.dtype.element_ty.primitive_bitwidth // 8
    vector: gl.constexpr = min(width, _VECTOR // size)
    across: gl.constexpr = min(width // vector, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, vector], [lanes // across, across], [4, 1], [1, 0])
    count: gl.constexpr = config.states
    number = gl.program_id(0) * config.rows + gl.arange(0, config.rows, gl.SliceLayout(1, layout))
    given = number < shape.count
    index = number // shape.heads
    head = number - index * shape.heads
    b = index // shape.tokens
    token = index - b * shape.tokens
    if config.limited:
        given = given & (token < gl.load(limit))
    col = gl.arange(0, width, gl.SliceLayout(0, layout))[None, :]
    there = given[:, None] & (col < config.dim)
    top = gl.full([config.rows], -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    total = gl.zeros_like(top)
    sum_out = gl.zeros([config.rows, width], gl.float32, layout)
    for i in gl.static_range(count):
        state = states[i]
        lse = gl.load(state.lse.pointer + row_start(state.lse, b, token, head), mask=given, other=-float("inf"))
        start = row_start(state.out, b, token, head) * config.run
        seen = lse != -float("inf")
        x = gl.load(state.out.pointer + start[:, None] + col, mask=there & seen[:, None], other=0.0).to(gl.float32)
        last = top
        top = gl.maximum(last, lse)
        shift = gl.where(top == -float("inf"), 0.0, top)
        kept = gl.exp2((last - shift) * _LOG2_E)
        weight = gl.exp2((lse - shift) * _LOG2_E)
        total = total * kept + weight
        sum_out = sum_out * kept[:, None] + x * weight[:, None]
    some = total != 0
    factor = gl.where(some, 1.0 / total, 0.0)
    lse = gl.where(some, top + gl.log2(total) * _LN_2, -float("inf"))
    gl.store(merged.lse.pointer + row_start(merged.lse, b, token, head), lse, mask=given)
    start = row_start(merged.out, b, token, head) * config.run
    out = (sum_out * factor[:, None]).to(merged.out.pointer.dtype.element_ty)
    gl.store(merged.out.pointer + start[:, None] + col, out, mask=there)


@gluon.jit
def row_start(rows, b, token, head):
    """Where rows start, in the unit of the strides."""
    return b.to(gl.int64) * rows.outer + token.to(gl.int64) * rows.row + head.to(gl.int64) * rows.head
