"""The scheduler of ragged and paged batches with split keys: `VarlenScheduler`, with several CTAs for each tile.

The parts of a tile have consecutive numbers. The workspace holds `splits` copies of the batch's output, one after the
other; part s of a tile writes its partial output to the tile's rows of copy s.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces import scheduler_sizes
from ...pieces.scheduler import get_field, put_field
from ...pieces.scheduler_split import keys_of_part
from ...pieces.scheduler_varlen import (
    VARLEN_TILE_FIELDS,
    VarlenScheduler,
    VarlenTile,
    publish_lengths,
    read_lengths,
    tile_of_list,
)

SPLIT_VARLEN_FIELDS = gl.constexpr(scheduler_sizes.SPLIT_VARLEN_FIELDS)


@gluon.aggregate
class VarlenPart(VarlenTile):
    """A part of an output tile."""

    split: gl.tensor  # number of the part
    out: gl.tensor  # first query of the sequence in the part's copy of the batch

    @gluon.jit
    def output(self):
        return self.out


@gluon.aggregate
class SplitVarlenScheduler(VarlenScheduler):
    """As `SplitWork` for a dense batch."""

    starts: gl.tensor  # size of one copy of the batch: rows (ragged queries) or sequences
    row_unit: gl.tensor  # rows per unit of `starts`: 1, or the queries of a sequence
    splits: gl.tensor  # parts of a tile

    @gluon.jit
    def total(self):
        """Number of parts of all tiles."""
        return self.heads_q // self.packed * self.blocks * self.splits

    @gluon.jit
    def tile(self, number, tokens: gl.constexpr):
        """Part `number` among those of all tiles."""
        of_tile = number // self.splits
        tile = tile_of_list(self, of_tile, number < self.total())
        return self.part(tile, number - of_tile * self.splits, number)

    @gluon.jit
    def part(self, tile, split, number):
        """Part `split` of a tile, number `number` of all."""
        out = tile.q_start + split * self.starts
        return VarlenPart(
            tile.b, tile.h, tile.row, tile.q_start, tile.seq_q, tile.k_start, tile.seq_k, number, split, out
        )

    @gluon.jit
    def key_tiles(self, mods, tile, config: gl.constexpr):
        """The key tiles of a part."""
        return keys_of_part(mods, tile, tile, self.splits, config)

    @gluon.jit
    def lse_rows(self, lse, tile, head, token):
        """Pointers to the workspace's LSE (part, row, heads_q) of a head and token, any shape."""
        return lse + (tile.out.to(gl.int64) * self.row_unit + token) * self.heads_q + head

    @gluon.jit
    def publish(self, slots, index, tile):
        """Writes a part into a slot of [stages * SPLIT_VARLEN_FIELDS, 1]; one warp calls it."""
        first = index * SPLIT_VARLEN_FIELDS
        publish_lengths(slots, first, tile)
        put_field(slots.index(first + VARLEN_TILE_FIELDS), tile.split)

    @gluon.jit
    def read(self, slots, index):
        """The part in a slot, without the start of its keys; four warps call it."""
        first = index * SPLIT_VARLEN_FIELDS
        tile = read_lengths(slots, first)
        return self.part(tile, get_field(slots.index(first + VARLEN_TILE_FIELDS)), tile.number)
