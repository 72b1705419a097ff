"""Roles that return values, and reductions whose combiner makes tensors."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import add2

N: gl.constexpr = gl.constexpr(64)
ROW: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def double_role(x):
    value = gl.load(x + gl.arange(0, N, ROW))
    return value + value, gl.sum(value, 0)


@gluon.jit
def tell_role(mark):
    gl.store(mark, 1)


@gluon.jit
def one_role(x):
    return gl.sum(gl.load(x + gl.arange(0, N, ROW)), 0)


@gluon.jit
def results_kernel(x, out, total, mark, ONE: gl.constexpr):
    """out = 2x and total = Σx (ONE: total alone), which the default role returns, while another one stores a mark."""
    if ONE:
        gl.store(total, gl.warp_specialize([(one_role, (x,)), (tell_role, (mark,))], [1], [24]))
    else:
        doubled, sum = gl.warp_specialize([(double_role, (x,)), (tell_role, (mark,))], [1], [24])
        gl.store(out + gl.arange(0, N, ROW), doubled)
        gl.store(total, sum)


@gluon.jit
def pairs(a, b, c, d):
    parent: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, gl.num_warps()], [1, 0])
    lane = gl.arange(0, 2, layout=gl.SliceLayout(0, parent))
    return gl.where(lane == 0, a, b), gl.where(lane == 0, c, d)


@gluon.jit
def sums(a, b, c, d):
    """(a + c, b + d) by one addition of pairs."""
    left, right = pairs(a, b, c, d)
    return gl.split(left + right)


@gluon.jit
def packed_sums(a, b, c, d):
    left, right = pairs(a, b, c, d)
    return gl.split(add2(left, right))


@gluon.jit
def larger_pair(a, b, c, d):
    """The pair with the larger first part, by way of a [2, 2] tensor."""
    parent: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, gl.num_warps()], [1, 0])
    first, second = pairs(a, b, c, d)
    left, right = gl.split(gl.join(first, second).permute((1, 0)).permute((1, 0)))
    winner = gl.where(a >= c, left, right)
    return gl.split(gl.convert_layout(winner, gl.SliceLayout(0, parent)))


@gluon.jit
def reduce_kernel(x, y, out, COMBINER: gl.constexpr):
    """out[0], out[1]: the rows of x and of y reduced together."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows, cols = gl.arange(0, 16, gl.SliceLayout(1, layout)), gl.arange(0, 64, gl.SliceLayout(0, layout))
    at = rows[:, None] * 64 + cols[None, :]
    pair = (gl.load(x + at), gl.load(y + at))
    if COMBINER == "sums":
        a, b = gl.reduce(pair, axis=1, combine_fn=sums)
    elif COMBINER == "packed sums":
        a, b = gl.reduce(pair, axis=1, combine_fn=packed_sums)
    else:
        a, b = gl.reduce(pair, axis=1, combine_fn=larger_pair)
    gl.store(out + rows, a)
    gl.store(out + 16 + rows, b)
