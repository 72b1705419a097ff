"""From lengths on the device to the list of `tiles_lengths`, longest tile first, without the host.

Places in a batch where a query block may begin are numbered without adding lengths up: sequence b, whose rows begin at
`start`, has the numbers from  start // block_m + b  on, a few more than it has blocks. What number belongs to which
sequence is then a binary search in the offsets, and numbers without rows fall out because they sort last.

One program places 32 numbers: it counts the key tiles of each by the mask's span, and compares with those of every
other number, 256 at a time. That is quadratic in the number of blocks, and needs neither atomics nor a second pass.

      number ──▶ sequence, first row ──▶ key tiles of the span ──▶ place = how many are longer ──▶ record
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .scheduler_varlen import BLOCKS, COUNTER, RECORD
from .span import tile_span

OWN = gl.constexpr(32)  # numbers of a program
OTHERS = gl.constexpr(256)  # that they are compared with at a time
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))  # [OTHERS]
DOWN = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])))  # [OWN] of [OWN, OTHERS]
ALONG = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])))  # [OTHERS]


@gluon.aggregate
class Lengths:
    """Where the lengths of a batch stand."""

    q: gl.tensor  # int32*: row offsets of the queries (batch + 1,); unused when every sequence has `seq_q`
    k: gl.tensor  # int32*: row offsets of the keys (batch + 1,), or lengths (batch,)
    batch: gl.tensor
    seq_q: gl.tensor  # queries of every sequence
    most_k: gl.tensor  # keys that a sequence can have
    ragged: gl.constexpr  # offsets of both, or as many queries everywhere and lengths of the keys

    @gluon.jit
    def queries(self, b):
        """(first row or number of the sequence, length) of the queries of sequences `b`; others have length 0."""
        inside = b < self.batch
        if self.ragged:
            start = gl.load(self.q + b, mask=inside, other=0)
            return start, gl.maximum(gl.load(self.q + b + 1, mask=inside, other=0) - start, 0)
        else:
            return b, gl.where(inside, self.seq_q, 0)

    @gluon.jit
    def keys(self, b):
        """(first row, length) of the keys of sequences `b`."""
        inside = b < self.batch
        if self.ragged:
            start = gl.load(self.k + b, mask=inside, other=0)
            return start, gl.maximum(gl.load(self.k + b + 1, mask=inside, other=0) - start, 0)
        else:
            length = gl.load(self.k + b, mask=inside, other=0)
            return gl.zeros_like(b), gl.minimum(gl.maximum(length, 0), self.most_k)


@gluon.jit
def order_kernel(
    q_ptr, k_ptr, list_ptr, shape, mask_args, ragged: gl.constexpr, span: gl.constexpr,
    block_m: gl.constexpr, block_n: gl.constexpr,
):  # fmt: skip
    """Write the list. `shape` is (batch, seq_q, most_k, numbers), see `Lengths`; `span` is that of `apply.Modifiers`.

    Grid: as many programs as hold all numbers, `OWN` each; those that hold none do no harm.
    """
    lengths = Lengths(q_ptr, k_ptr, shape[0], shape[1], shape[2], ragged)
    number = gl.program_id(0) * OWN + gl.arange(0, OWN, DOWN)
    b, row = find_block(number, lengths, block_m)
    long = key_tiles(number < shape[3], b, row, lengths, span, mask_args, block_m, block_n)
    place = gl.zeros([OWN], gl.int32, DOWN)
    blocks = gl.to_tensor(0)
    for start in range(0, shape[3], OTHERS):
        other = start + gl.arange(0, OTHERS, FLAT)
        other_b, other_row = find_block(other, lengths, block_m)
        other_long = key_tiles(other < shape[3], other_b, other_row, lengths, span, mask_args, block_m, block_n)
        blocks += gl.sum((other_long >= 0).to(gl.int32), 0)
        along = gl.convert_layout(other_long, ALONG)[None, :]
        earlier = start + gl.arange(0, OTHERS, ALONG)[None, :] < number[:, None]
        ahead = (along > long[:, None]) | ((along == long[:, None]) & earlier)
        place += gl.sum(ahead.to(gl.int32), 1)
    q_start, seq_q = lengths.queries(b)
    k_start, seq_k = lengths.keys(b)
    record = list_ptr + RECORD + place * RECORD
    inside = long >= 0
    gl.store(record, b, mask=inside)
    gl.store(record + 1, row, mask=inside)
    gl.store(record + 2, q_start, mask=inside)
    gl.store(record + 3, seq_q, mask=inside)
    gl.store(record + 4, k_start, mask=inside)
    gl.store(record + 5, seq_k, mask=inside)
    if gl.program_id(0) == 0:
        gl.store(list_ptr + BLOCKS, blocks)
        gl.store(list_ptr + COUNTER, 0)


@gluon.jit
def find_block(number, lengths, block_m: gl.constexpr):
    """(sequence, first row) of numbers, any shape; there may be no such row."""
    if lengths.ragged:
        b = gl.zeros_like(number)
        size = lengths.batch
        while size > 1:  # the last sequence that begins at a number up to this one is among `size` from b on
            half = size // 2
            start = gl.load(lengths.q + b + half)
            b = gl.where(start // block_m + b + half <= number, b + half, b)
            size -= half
        first = gl.load(lengths.q + b) // block_m + b
        return b, (number - first) * block_m
    else:
        blocks = gl.maximum((lengths.seq_q + block_m - 1) // block_m, 1)
        b = number // blocks
        return b, (number - b * blocks) * block_m


@gluon.jit
def key_tiles(
    inside, b, row, lengths, span: gl.constexpr, mask_args, block_m: gl.constexpr, block_n: gl.constexpr
):  # fmt: skip
    """Key tiles that blocks need, by the span of head 0; -1 where `row` is not in the sequence or not `inside`."""
    _, seq_q = lengths.queries(b)
    _, seq_k = lengths.keys(b)
    inside = inside & (row >= 0) & (row < seq_q)
    offset = seq_k - seq_q
    q_hi = gl.minimum(row + block_m, seq_q) - 1 + offset
    interval = span(gl.where(inside, b, 0), gl.to_tensor(0), row + offset, q_hi, seq_q, seq_k, mask_args)
    return gl.where(inside, tile_span(interval, block_n).total, -1)
