"""The kernel that makes the tile list of `scheduler_varlen` from lengths on the device, longest tile first.

Candidates (places in a batch where a query block may begin) are numbered without a sum over lengths: sequence b, whose
rows begin at `start`, has the numbers from  start // block_m + b  on, a few more than it has blocks. A binary search in
the offsets finds the sequence of a number; numbers without rows sort last and are dropped.

One program ranks 32 candidates: it counts each one's key tiles by the mask's span and compares them with those of all
others, 256 at a time. That is quadratic in the number of blocks, but needs neither atomics nor a second pass.

      number ──▶ sequence, first row ──▶ key tiles of the span ──▶ rank = how many are longer ──▶ record
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..pieces import scheduler_sizes
from ..pieces.scheduler_varlen import BLOCKS, COUNTER, RECORD
from ..pieces.span import tile_span

OWN = gl.constexpr(scheduler_sizes.PROGRAM_BLOCKS)  # candidates of a program
OTHERS = gl.constexpr(256)  # candidates that a program's own are compared with at a time
WARPS = gl.constexpr(scheduler_sizes.ORDER_WARPS)
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS.value], [0]))  # [OTHERS]
PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [WARPS.value, 1], [1, 0]))  # [OWN, OTHERS]
DOWN = gl.constexpr(gl.SliceLayout(1, PAIRS.value))  # [OWN]
ALONG = gl.constexpr(gl.SliceLayout(0, PAIRS.value))  # [OTHERS]


@gluon.aggregate
class Lengths:
    """The lengths of a batch."""

    q: gl.tensor  # int32*: row offsets of the queries (batch + 1,); unused if every sequence has `seq_q` queries
    k: gl.tensor  # int32*: row offsets of the keys (batch + 1,), or lengths (batch,)
    batch: gl.tensor
    seq_q: gl.tensor  # queries of every sequence
    most_k: gl.tensor  # maximum keys of a sequence
    least_q: gl.tensor  # ragged sequences with fewer queries count as having none
    ends: gl.tensor  # int32*, see `ListedSequences`
    capacity: gl.tensor
    copied: gl.tensor
    ragged_q: gl.constexpr  # whether `q` has offsets; else every sequence has `seq_q` queries
    ragged_k: gl.constexpr  # whether `k` has offsets; else lengths

    @gluon.jit
    def queries(self, b):
        """(first row, or `b` if not ragged; number of queries) of sequences `b`; no queries past the last sequence."""
        inside = b < self.batch
        if self.ragged_q:
            start = gl.load(self.q + b, mask=inside, other=0)
            length = gl.load(self.q + b + 1, mask=inside, other=0) - start
            return start, gl.where((length >= self.least_q) & self.listed(b, inside), length, 0)
        else:
            return b, gl.where(inside, self.seq_q, 0)

    @gluon.jit
    def listed(self, b, inside):
        """Whether sequences `b` are listed, by whether their keys have copies."""
        chosen = inside & (self.copied != 0)
        start = gl.load(self.ends + b, mask=chosen & (b > 0), other=0)
        end = gl.load(self.ends + 1 + b, mask=chosen, other=0)
        has_copies = (end > start) & (end <= self.capacity)
        return inside & ((self.copied == 0) | (has_copies == (self.copied > 0)))

    @gluon.jit
    def keys(self, b):
        """(first row, length) of the keys of sequences `b`."""
        inside = b < self.batch
        if self.ragged_k:
            start = gl.load(self.k + b, mask=inside, other=0)
            return start, gl.maximum(gl.load(self.k + b + 1, mask=inside, other=0) - start, 0)
        else:
            length = gl.load(self.k + b, mask=inside, other=0)
            return gl.zeros_like(b), gl.minimum(gl.maximum(length, 0), self.most_k)


@gluon.jit
def order_kernel(
    q_ptr, k_ptr, list_ptr, shape, only, mask_args, ragged_q: gl.constexpr, ragged_k: gl.constexpr,
    span: gl.constexpr, block_m: gl.constexpr, block_n: gl.constexpr,
):  # fmt: skip
    """Writes the list. `shape` is an `OrderShape`, `only` a `ListedSequences`; `span` is that of `Modifiers`.

    Grid: one program per `OWN` candidates; a program without candidates writes no record. The attention kernel that
    follows may start meanwhile (PDL).
    """
    gdc_wait()
    gdc_launch_dependents()  # all kernels before this one have ended
    lengths = Lengths(
        q_ptr, k_ptr, shape.batch, shape.seq_q, shape.most_k, only.least_q, only.ends, only.capacity, only.copied,
        ragged_q, ragged_k,
    )  # fmt: skip
    number = gl.program_id(0) * OWN + gl.arange(0, OWN, DOWN)
    b, row = find_block(number, lengths, block_m)
    long = key_tiles(number < shape.candidates, b, row, lengths, span, mask_args, block_m, block_n)
    rank = gl.zeros([OWN], gl.int32, DOWN)
    blocks = gl.to_tensor(0)
    for start in range(0, shape.candidates, OTHERS):
        other = start + gl.arange(0, OTHERS, FLAT)
        other_b, other_row = find_block(other, lengths, block_m)
        other_long = key_tiles(other < shape.candidates, other_b, other_row, lengths, span, mask_args, block_m, block_n)
        blocks += gl.sum((other_long >= 0).to(gl.int32), 0)
        along = gl.convert_layout(other_long, ALONG)[None, :]
        earlier = start + gl.arange(0, OTHERS, ALONG)[None, :] < number[:, None]
        before = (along > long[:, None]) | ((along == long[:, None]) & earlier)
        rank += gl.sum(before.to(gl.int32), 1)
    q_start, seq_q = lengths.queries(b)
    k_start, seq_k = lengths.keys(b)
    record = list_ptr + RECORD + rank * RECORD
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
    """(sequence, first row) of candidates, any shape; the row may lie past the sequence's end."""
    if lengths.ragged_q:
        b = gl.zeros_like(number)
        size = lengths.batch
        while size > 1:  # the sequence is one of the `size` from b on
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
    """Key tiles of blocks by the span of head 0; -1 where `row` is not in the sequence or not `inside`."""
    _, seq_q = lengths.queries(b)
    _, seq_k = lengths.keys(b)
    inside = inside & (row >= 0) & (row < seq_q)
    offset = seq_k - seq_q
    q_hi = gl.minimum(row + block_m, seq_q) - 1 + offset
    interval = span(gl.where(inside, b, 0), gl.to_tensor(0), row + offset, q_hi, seq_q, seq_k, mask_args)
    return gl.where(inside, tile_span(interval, block_n).total, -1)
