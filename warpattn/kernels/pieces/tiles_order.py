"""From lengths on the device to the list of `tiles_lengths`, longest tile first, without the host.

One program places 128 query blocks: it finds each one's sequence, counts its key tiles by the mask's span, and compares
with every other block to learn its place. That is quadratic in the number of blocks, and needs neither atomics nor a
second pass: 132 blocks (16,896 ragged tokens) are 2 programs that make 2 rounds each.

      block number ──▶ sequence, first row ──▶ key tiles of the span ──▶ place = how many are longer ──▶ record
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .span import tile_span
from .tiles_lengths import BLOCKS, COUNTER, RECORD

MANY = gl.constexpr(128)  # blocks, and sequences, that are looked at together
GRID = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))  # [block, other block or sequence]
DOWN = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0])))
ALONG = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0])))


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
    """Write the list. `shape` is (batch, seq_q, most_k), see `Lengths`; `span` is that of `apply.Modifiers`.

    Grid: as many programs as hold all blocks, 128 each; those that hold none do no harm.
    """
    lengths = Lengths(q_ptr, k_ptr, shape[0], shape[1], shape[2], ragged)
    number = gl.program_id(0) * MANY + gl.arange(0, MANY, DOWN)
    b, row, blocks = find_block(number, lengths, block_m)
    long = key_tiles(number < blocks, b, row, lengths, span, mask_args, block_m, block_n)
    place = gl.zeros([MANY], gl.int32, DOWN)
    for start in range(0, blocks, MANY):
        other = start + gl.arange(0, MANY, DOWN)
        other_b, other_row, _ = find_block(other, lengths, block_m)
        other_long = key_tiles(other < blocks, other_b, other_row, lengths, span, mask_args, block_m, block_n)
        along = gl.convert_layout(other_long, ALONG)[None, :]
        earlier = start + gl.arange(0, MANY, ALONG)[None, :] < number[:, None]
        ahead = (along > long[:, None]) | ((along == long[:, None]) & earlier)
        place += gl.sum(ahead.to(gl.int32), 1)
    q_start, seq_q = lengths.queries(b)
    k_start, seq_k = lengths.keys(b)
    record = list_ptr + RECORD + place * RECORD
    inside = number < blocks
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
    """(sequence, first row) of query blocks [MANY], counted sequence by sequence, and how many there are in all."""
    b = gl.zeros([MANY], gl.int32, DOWN)
    start = gl.zeros([MANY], gl.int32, DOWN)
    before = gl.to_tensor(0)
    for first in range(0, lengths.batch, MANY):
        sequence = first + gl.arange(0, MANY, DOWN)
        _, seq_q = lengths.queries(sequence)
        blocks = (seq_q + block_m - 1) // block_m
        up_to = (gl.arange(0, MANY, DOWN)[:, None] <= gl.arange(0, MANY, ALONG)[None, :]).to(gl.int32)
        ends = before + gl.sum(blocks[:, None] * up_to, 0)  # [sequence]: blocks of all up to it
        passed = (ends[None, :] <= number[:, None]) & (first + gl.arange(0, MANY, ALONG)[None, :] < lengths.batch)
        b += gl.sum(passed.to(gl.int32), 1)
        start = gl.maximum(start, gl.max(gl.where(passed, ends[None, :], 0), 1))
        before += gl.sum(blocks, 0)
    return b, (number - start) * block_m, before


@gluon.jit
def key_tiles(
    inside, b, row, lengths, span: gl.constexpr, mask_args, block_m: gl.constexpr, block_n: gl.constexpr
):  # fmt: skip
    """Key tiles that blocks [MANY] need, by the span of head 0; -1 for those that do not exist."""
    _, seq_q = lengths.queries(b)
    _, seq_k = lengths.keys(b)
    offset = seq_k - seq_q
    q_hi = gl.minimum(row + block_m, seq_q) - 1 + offset
    interval = span(gl.where(inside, b, 0), gl.to_tensor(0), row + offset, q_hi, seq_q, seq_k, mask_args)
    return gl.where(inside, tile_span(interval, block_n).total, -1)
