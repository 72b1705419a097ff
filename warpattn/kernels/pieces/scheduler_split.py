"""Output tiles whose keys are shared out over several CTAs, where there are fewer tiles than SMs.

      number ──▶ tile, part ──▶ the part's run of key tiles ──▶ O and LSE of the part in a workspace ──▶ combine_parts

The parts of a tile have consecutive numbers. Each has at least one key tile: one past the end of the keys, all of which
is hidden, where a tile has more parts than key tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import scheduler_sizes
from .scheduler import Work, decode_tile, get_field, put_field
from .span import TileRun, partition_tiles, tile_span

SPLIT_TILE_FIELDS = gl.constexpr(scheduler_sizes.SPLIT_TILE_FIELDS)


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
    """The key tiles of a part; `lengths` has those of its sequence."""
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
        """Part `number` of all."""
        of_tile = number // self.splits
        tile = decode_tile(of_tile, self, tokens, number < self.total())
        return self.part(tile.b, tile.h, tile.row, number - of_tile * self.splits)

    @gluon.jit
    def part(self, b, h, row, split):
        """Part number `split` of a tile."""
        return SplitTile(b, h, row, split, split * self.batch + b)

    @gluon.jit
    def place(self, tile, tokens: gl.constexpr):
        """One int32 for a part, not negative."""
        of_tile = (tile.b * self.heads_q + tile.h) * self.m_tiles + tile.row // tokens
        return of_tile * self.splits + tile.split

    @gluon.jit
    def tile_at(self, place, tokens: gl.constexpr):
        """The part at a place."""
        of_tile = place // self.splits
        head = of_tile // self.m_tiles
        b = head // self.heads_q
        row = (of_tile - head * self.m_tiles) * tokens
        return self.part(b, head - b * self.heads_q, row, place - of_tile * self.splits)

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
        """Write a part into a slot of [stages * SPLIT_TILE_FIELDS, 1]; one warp calls it."""
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
