"""The kernel for gradients of tensors that a score function captures; it recomputes the scores, 64 query rows a CTA.

    dT[i] += sum of dx * df/dT over the pairs (row, key) that read T[i]        dx = p * (dp - total)

A CTA loops over the key tiles twice: first for each row's total, the sum of p * dp; then to add dx * df/dT. (The sum of
dout * out would contain the rounding of out, which is the same for all pairs of a row and does not average out.) Before
it adds, it sums over rows or keys on which the index i does not depend, or over a whole tile whose pairs all read one
element; each remaining element takes one atomic addition. Each architecture has its own products, see `PairProducts`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...pieces.element_type import element_type
from ...pieces.modifiers import Modifiers, modifiers
from ...pieces.softmax import LOG2_E
from ..finite import bound_nonfinite, clear_nonfinite
from . import arguments as sizes
from .rows import padded_start, sequence_at, strided_rows

TILE = gl.constexpr(sizes.CAPTURED_ROWS)


@gluon.aggregate
class Lines:
    """Rows of a tensor that threads copy, with the fields that `strided_rows` reads."""

    b: gl.tensor
    h: gl.tensor
    token: gl.tensor  # [TILE]


@gluon.aggregate
class Rows:
    """The query rows of a CTA, with the fields that `Modifiers` read from a tile and from its scheduler."""

    b: gl.tensor
    h: gl.tensor
    row: gl.tensor
    seq_q: gl.tensor
    seq_k: gl.tensor
    q_start: gl.tensor  # token of the sequence's first query; `k_start` of its first key
    k_start: gl.tensor
    given: gl.tensor  # int64, where the head's and sequence's numbers begin in lse and dlse


@gluon.aggregate
class Captured:
    """The arguments of every step of a CTA."""

    k: gl.base_value
    v: gl.base_value
    q_smem: gl.shared_memory_descriptor
    do_smem: gl.shared_memory_descriptor
    k_smem: gl.shared_memory_descriptor
    v_smem: gl.shared_memory_descriptor
    rows: Rows
    lse: gl.tensor  # [TILE], inf for rows that do not exist or see no key
    mods: Modifiers
    scale: gl.tensor
    group: gl.tensor
    memory: gl.base_value  # what `PairProducts.memory` has allocated
    products: gl.constexpr
    config: gl.constexpr


@gluon.jit
def captured_kernel(
    reads, statistics, sums, cu_q, cu_k, scale, shape, mask_args, score_args,
    config: gl.constexpr, functions: gl.constexpr, adjoints: gl.constexpr, products: gl.constexpr,
    has_dlse: gl.constexpr,
):  # fmt: skip
    """reads: `StridedRows` of q, k, v, dout. statistics: `Statistics`. sums: fp32 tensors to add to, one of each of
    `adjoints`, which are `AdjointFunctions`. shape: `CapturedShape`. products: `PairProducts`. Grid: (tiles of rows,
    heads)."""
    mods = modifiers(functions, mask_args, score_args)
    rows = own_rows(shape, cu_q, cu_k, config)
    if rows.row < rows.seq_q:
        ctx = load_rows(reads, statistics, rows, mods, scale, shape, products, config)
        layout: gl.constexpr = products.layout
        first, _full_lo, _full_hi, last = mods.key_span(rows, rows, TILE)
        begin = gl.maximum(first, 0) // TILE * TILE
        end = gl.minimum(last, rows.seq_k)
        total = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, layout))
        if has_dlse:
            row = rows.row + gl.arange(0, TILE, gl.SliceLayout(1, layout))
            total = -gl.load(statistics.dlse + rows.given + row, mask=row < rows.seq_q, other=0.0)
        for key in range(begin, end, TILE):
            s, p, dp = weigh(ctx, key, (key - begin) // TILE)
            total += gl.sum(p * dp, 1)
        tiles = (end - begin + TILE - 1) // TILE
        for key in range(begin, end, TILE):
            s, p, dp = weigh(ctx, key, tiles + (key - begin) // TILE)
            dx = p * (dp - total[:, None])
            for i in gl.static_range(len(adjoints)):
                add_adjoint(ctx, adjoints[i], sums[i], s, dx, key)


@gluon.jit
def own_rows(shape, cu_q, cu_k, config: gl.constexpr):
    """The rows of this program."""
    first = gl.program_id(0) * TILE
    head = gl.program_id(1)
    if config.ragged:
        b = sequence_at(first, shape.batch, cu_q)
        q_start, k_start = gl.load(cu_q + b), gl.load(cu_k + b)
        seq_q, seq_k = gl.load(cu_q + b + 1) - q_start, gl.load(cu_k + b + 1) - k_start
        given = head.to(gl.int64) * shape.seq_q + q_start
        return Rows(b, head, first - padded_start(q_start, b), seq_q, seq_k, q_start, k_start, given)
    else:
        b = head // shape.heads_q
        zero = gl.to_tensor(0)
        given = head.to(gl.int64) * shape.seq_q
        return Rows(b, head - b * shape.heads_q, first, shape.seq_q, shape.seq_k, zero, zero, given)


@gluon.jit
def load_rows(reads, statistics, rows, mods, scale, shape, products: gl.constexpr, config: gl.constexpr):
    """Copies Q and dout to shared memory; returns a `Captured`."""
    q_smem, do_smem = allocate(config.whole_qk, config), allocate(config.whole_v, config)
    copy_rows(reads[0], q_smem, rows.b, rows.h, rows.q_start, rows.row, rows.seq_q, config.dim_qk)
    copy_rows(reads[3], do_smem, rows.b, rows.h, rows.q_start, rows.row, rows.seq_q, config.dim_v)
    i = rows.row + gl.arange(0, TILE, gl.SliceLayout(1, products.layout))
    lse = gl.load(statistics.lse + rows.given + i, mask=i < rows.seq_q, other=float("inf"))
    lse = gl.where(lse == -float("inf"), float("inf"), lse)
    k_smem, v_smem = allocate(config.whole_qk, config), allocate(config.whole_v, config)
    return Captured(
        reads[1], reads[2], q_smem, do_smem, k_smem, v_smem, rows, lse, mods, scale, shape.group, products.memory(),
        products, config,
    )  # fmt: skip


@gluon.jit
def weigh(ctx, key, number):
    """(S times the scale, P, dP) [TILE, TILE] of the tile of keys that begins with `key`; `number`: tiles before."""
    rows = ctx.rows
    h = rows.h // ctx.group
    gl.barrier()  # all warps have read the previous tile
    copy_rows(ctx.k, ctx.k_smem, rows.b, h, rows.k_start, key, rows.seq_k, ctx.config.dim_qk)
    copy_rows(ctx.v, ctx.v_smem, rows.b, h, rows.k_start, key, rows.seq_k, ctx.config.dim_v)
    fence_async_shared()  # products see the copies
    gl.barrier()
    if ctx.mods.keep is not None:  # hidden K and V are multiplied by 0, which must not give NaN
        bound_nonfinite(ctx.k_smem)
        clear_nonfinite(ctx.v_smem)
    s, dp = ctx.products.multiply(ctx, number)
    q, k = positions(ctx, key)
    x = ctx.mods.visible_scores(s, ctx.scale, rows, rows, q[:, None], k[None, :], True)
    return s * ctx.scale, gl.exp2((x - ctx.lse[:, None]) * LOG2_E), dp


@gluon.jit
def add_adjoint(ctx, adjoint: gl.constexpr, pointer, s, dx, key):
    """Adds a tile's part of one gradient; `adjoint` is an `AdjointFunctions`."""
    rows, args = ctx.rows, ctx.mods.score_args
    layout: gl.constexpr = ctx.products.layout
    q, k = positions(ctx, key)
    value = adjoint.value(s, rows.b, rows.h, q[:, None], k[None, :], rows.seq_q, rows.seq_k, args)
    part = gl.where(dx == 0, 0.0, dx * value)  # a value may be infinite where nothing is visible
    if adjoint.by_row and adjoint.by_key:
        at, inside = element(ctx, adjoint, s, q[:, None], k[None, :])
        at += gl.zeros([TILE, TILE], gl.int64, layout)
        inside = inside & (part != 0)
        if adjoint.shared:
            lowest = gl.min(gl.min(gl.where(inside, at, 2**62), 1), 0)
            highest = gl.max(gl.max(gl.where(inside, at, -1), 1), 0)
            whole = gl.sum(gl.sum(gl.where(inside, part, 0.0), 1), 0)
            gl.atomic_add(pointer + gl.maximum(highest, 0), whole, mask=lowest == highest, sem="relaxed")
            inside = inside & (lowest != highest)
        gl.atomic_add(pointer + at, part, mask=inside, sem="relaxed")
    else:
        zero = gl.to_tensor(0)
        if adjoint.by_row:
            part = gl.sum(part, 1)
            at, inside = element(ctx, adjoint, part, q, zero)
        elif adjoint.by_key:
            part = gl.sum(part, 0)
            at, inside = element(ctx, adjoint, part, zero, k)
        else:
            part = gl.sum(gl.sum(part, 1), 0)
            at, inside = element(ctx, adjoint, part, zero, zero)
        gl.atomic_add(pointer + at, part, mask=inside & (part != 0), sem="relaxed")


@gluon.jit
def element(ctx, adjoint: gl.constexpr, s, q, k):
    """(index of the element that pairs read in the contiguous tensor, whether it is inside)."""
    rows, args = ctx.rows, ctx.mods.score_args
    at = gl.to_tensor(0).to(gl.int64)
    inside = gl.to_tensor(True)
    for axis in gl.static_range(len(adjoint.index)):
        i = gl.to_tensor(adjoint.index[axis](s, rows.b, rows.h, q, k, rows.seq_q, rows.seq_k, args))
        size = args[adjoint.sizes + axis]
        inside = inside & (i >= 0) & (i < size)
        at = at * size + i
    return at, inside


@gluon.jit
def positions(ctx, key):
    """(queries in key coordinates, keys) of a tile, [TILE] each."""
    layout: gl.constexpr = ctx.products.layout
    rows = ctx.rows
    q = rows.row + rows.seq_k - rows.seq_q + gl.arange(0, TILE, gl.SliceLayout(1, layout))
    return q, key + gl.arange(0, TILE, gl.SliceLayout(0, layout))


@gluon.jit
def allocate(cols: gl.constexpr, config: gl.constexpr):
    """Shared memory for a tile [TILE, cols] that products read."""
    dtype: gl.constexpr = element_type(config.element)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, cols], dtype)
    return gl.allocate_shared_memory(dtype, [TILE, cols], layout)


@gluon.jit
def copy_rows(x, smem, b, h, start, row, length, dim: gl.constexpr):
    """Copies a head's rows from `row` on to shared memory; zeros past the sequence's end and past `dim` columns."""
    cols: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = copy_layout(cols)
    i = row + gl.arange(0, TILE, gl.SliceLayout(1, layout))
    col = gl.arange(0, cols, gl.SliceLayout(0, layout))
    inside = (i < length)[:, None] & (col < dim)[None, :]
    smem.store(gl.load(strided_rows(x, Lines(b, h, start + i), col), mask=inside, other=0.0))


@gluon.constexpr_function
def copy_layout(cols):
    """Registers of a [TILE, cols] tile: 8 elements of a row a thread."""
    lanes = min(32, cols // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
