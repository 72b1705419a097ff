"""The tile scheduler with split keys (split-KV): several CTAs share the keys of an output tile.

      number ──▶ tile, part ──▶ the part's run of key tiles ──▶ O and LSE of the part in a workspace ──▶ combine_parts

The parts of a tile have consecutive numbers. Each has at least one key tile; if a tile has more parts than key tiles,
some get a hidden one past the end of the keys.

A part is a run of a span's key tiles. Partitions are front-loaded: with T tiles over P
partitions, q = T // P and r = T % P, partition p has the tiles from p·q + min(p, r) to (p + 1)·q + min(p + 1, r). Two
warpgroups of a CTA may take every other tile:

      key tiles of a span      0 1 2 3 4 │ 5 6 7 8 │ 9 10 11 12            13 tiles over 3 partitions: 5, 4, 4
      warpgroup 0              0   2   4 │ 5   7   │ 9    11
      warpgroup 1                1   3   │   6   8 │   10    12
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import scheduler_sizes
from .scheduler import Work, decode_tile, get_field, place_of, put_field, tile_of_place
from .span import TileSpan, tile_span

SPLIT_TILE_FIELDS = gl.constexpr(scheduler_sizes.SPLIT_TILE_FIELDS)


@gluon.aggregate
class TileRun:
    """`total` key tiles of a span, every `step`-th from number `begin` on; the first `masked` need the mask."""

    span: TileSpan
    begin: gl.tensor
    step: gl.constexpr
    masked: gl.tensor
    total: gl.tensor

    @gluon.jit
    def key_tile(self, i):
        """Index of the key tile visited as number `i`."""
        return self.span.key_tile(self.begin + i * self.step)

    @gluon.jit
    def every_other(self, which: gl.constexpr):
        """The tiles with even (0) or odd (1) numbers."""
        masked = (gl.maximum(self.masked - which, 0) + 1) // 2
        total = (gl.maximum(self.total - which, 0) + 1) // 2
        return TileRun(self.span, self.begin + which * self.step, self.step * 2, masked, total)


@gluon.jit
def partition_tiles(span, partition, partitions, some):
    """The run of one partition; empty where there are fewer tiles than partitions, or where `some` is false."""
    tiles = gl.where(some, span.total, 0)
    size = tiles // partitions
    rest = tiles - size * partitions
    begin = partition * size + gl.minimum(partition, rest)
    total = size + (partition < rest).to(gl.int32)
    masked = gl.maximum(gl.minimum(span.masked - begin, total), 0)
    return TileRun(span, begin, 1, masked, total)


@gluon.aggregate
class SplitTile:
    """A part of an output tile: batch, first query head, first row; row -1 if no tile is left."""

    b: gl.tensor
    h: gl.tensor
    row: gl.tensor
    split: gl.tensor  # number of the part
    out: gl.tensor  # its batch entry in the workspace

    @gluon.jit
    def output(self):
        """The batch entry that its output is in."""
        return self.out


@gluon.aggregate
class KeyRun:
    """The key tiles of a part, see `TileSpan`."""

    run: TileRun
    beyond: gl.tensor  # a key tile past the end of the keys
    masked: gl.tensor
    total: gl.tensor

    @gluon.jit
    def key_tile(self, i):
        """Index of the key tile visited as number `i`."""
        return gl.where(self.run.total > 0, self.run.key_tile(i), self.beyond)


@gluon.jit
def keys_of_part(mods, tile, lengths, splits, config: gl.constexpr):
    """The key tiles of a part; `lengths` has `seq_q` and `seq_k` of its sequence."""
    span = tile_span(mods.key_span(tile, lengths, config.tokens), config.block_n)
    run = partition_tiles(span, tile.split, splits, True)
    none = run.total == 0
    beyond = (lengths.seq_k + config.block_n - 1) // config.block_n
    return KeyRun(run, beyond, gl.where(none, 1, run.masked), gl.maximum(run.total, 1))


@gluon.aggregate
class SplitWork(Work):
    """Scalars of a dense problem, see `Work`."""

    batch: gl.tensor
    splits: gl.tensor  # parts of a tile

    @gluon.jit
    def total(self):
        """Number of parts of all tiles."""
        return self.heads // self.packed * self.m_tiles * self.splits

    @gluon.jit
    def tile(self, number, tokens: gl.constexpr):
        """Part `number` among those of all tiles."""
        of_tile = number // self.splits
        tile = decode_tile(of_tile, self, tokens, number < self.total())
        return self.part(tile.b, tile.h, tile.row, number - of_tile * self.splits)

    @gluon.jit
    def part(self, b, h, row, split):
        """Part `split` of a tile."""
        return SplitTile(b, h, row, split, split * self.batch + b)

    @gluon.jit
    def place(self, tile, tokens: gl.constexpr):
        """A non-negative int32 that names a part."""
        return place_of(tile, self, tokens) * self.splits + tile.split

    @gluon.jit
    def tile_at(self, place, tokens: gl.constexpr):
        """The part with this `place`."""
        of_tile = place // self.splits
        tile = tile_of_place(of_tile, self, tokens)
        return self.part(tile.b, tile.h, tile.row, place - of_tile * self.splits)

    @gluon.jit
    def key_tiles(self, mods, tile, config: gl.constexpr):
        """The key tiles of a part."""
        return keys_of_part(mods, tile, self, self.splits, config)

    @gluon.jit
    def lse_rows(self, lse, tile, head, token):
        """Pointers to the workspace's LSE (part, batch, seq_q, heads_q) of a head and token, any shape."""
        return lse + (tile.out.to(gl.int64) * self.seq_q + token) * self.heads_q + head

    @gluon.jit
    def publish(self, slots, index, tile):
        """Writes a part into a slot of [stages * SPLIT_TILE_FIELDS, 1]; one warp calls it."""
        first = index * SPLIT_TILE_FIELDS
        put_field(slots.index(first), tile.b)
        put_field(slots.index(first + 1), tile.h)
        put_field(slots.index(first + 2), tile.row)
        put_field(slots.index(first + 3), tile.split)

    @gluon.jit
    def read(self, slots, index):
        """The part in a slot; four warps call it."""
        first = index * SPLIT_TILE_FIELDS
        b, h = get_field(slots.index(first)), get_field(slots.index(first + 1))
        return self.part(b, h, get_field(slots.index(first + 2)), get_field(slots.index(first + 3)))
