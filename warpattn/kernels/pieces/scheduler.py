"""The persistent tile scheduler of dense prefill: hands out output tiles dynamically, the longest first.

Tiles are numbered section by section. A section is a run of (batch, head) pairs whose K and V fit in L2 together;
inside it the query tiles go from the last (longest under a causal mask) to the first, heads fastest:

      tile ──▶ section ──▶ query tile (descending) ──▶ head inside the section

The first tile of a CTA is its own number; further ones come from an atomic counter, which the last fetch resets to
zero for the next launch. Only the producer fetches tiles. It writes batch, head and row of each tile into shared memory
beside the queries, so that the four divisions are done once and no other role waits for them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import scheduler_sizes
from .span import tile_span

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of the producer's warp
TILE_FIELDS = gl.constexpr(scheduler_sizes.TILE_FIELDS)  # a first row of -1: no tile is left


@gluon.aggregate
class Work:
    """Scalars of the problem, all int32."""

    seq_q: gl.tensor
    seq_k: gl.tensor
    heads_q: gl.tensor
    group: gl.tensor  # query heads per key head
    m_tiles: gl.tensor  # query tiles per head
    heads: gl.tensor  # batch * heads_q
    section: gl.tensor  # heads per section
    packed: gl.constexpr  # query heads of a tile, a divisor of `group`

    @gluon.jit
    def total(self):
        """Number of tiles."""
        return self.heads // self.packed * self.m_tiles

    @gluon.jit
    def tile(self, number, tokens: gl.constexpr):
        """Output tile `number` of `tokens` queries."""
        return decode_tile(number, self, tokens, number < self.total())

    @gluon.jit
    def key_tiles(self, mods, tile, config: gl.constexpr):
        """The key tiles of a tile."""
        return tile_span(mods.key_span(tile, self, config.tokens), config.block_n)

    @gluon.jit
    def place(self, tile, tokens: gl.constexpr):
        """A non-negative int32 that names a tile."""
        return place_of(tile, self, tokens)

    @gluon.jit
    def tile_at(self, place, tokens: gl.constexpr):
        """The tile with this `place`."""
        return tile_of_place(place, self, tokens)

    @gluon.jit
    def lengths(self, tile):
        """A value with the fields `seq_q` and `seq_k` of a tile's sequence."""
        return self

    @gluon.jit
    def lse_rows(self, lse, tile, head, token):
        """Pointers to the LSE (batch, heads_q, seq_q) of a head and token, any shape."""
        return lse + (tile.b * self.heads_q + head).to(gl.int64) * self.seq_q + token

    @gluon.jit
    def query_place(self, tile, token):
        """(batch entry, row) of a query token of a tile's sequence, any shape."""
        return tile.b, token

    @gluon.jit
    def publish(self, slots, index, tile):
        """Writes a tile into a slot of [stages * TILE_FIELDS, 1]; one warp calls it."""
        first = index * TILE_FIELDS
        put_field(slots.index(first), tile.b)
        put_field(slots.index(first + 1), tile.h)
        put_field(slots.index(first + 2), tile.row)

    @gluon.jit
    def read(self, slots, index):
        """The tile in a slot; four warps call it."""
        first = index * TILE_FIELDS
        return Tile(get_field(slots.index(first)), get_field(slots.index(first + 1)), get_field(slots.index(first + 2)))


@gluon.aggregate
class Tile:
    """One output tile: batch, its first query head and first query row; row -1 if no tile is left."""

    b: gl.tensor
    h: gl.tensor
    row: gl.tensor

    @gluon.jit
    def output(self):
        """The batch entry that its output is in."""
        return self.b


@gluon.jit
def decode_tile(number, work, tokens: gl.constexpr, inside):
    """Batch, first head and first row of tile `number`, if it is `inside`."""
    per_section = work.section // work.packed * work.m_tiles
    section = number // per_section
    rest = number - section * per_section
    width = gl.maximum(gl.minimum(work.section, work.heads - section * work.section) // work.packed, 1)
    m = rest // width
    head = section * work.section + (rest - m * width) * work.packed
    b = head // work.heads_q
    row = gl.where(inside, (work.m_tiles - 1 - m) * tokens, -1)
    return Tile(b, head - b * work.heads_q, row)


@gluon.jit
def place_of(tile, work, tokens: gl.constexpr):
    """A number for a tile: heads of a batch entry follow each other, tiles of a head from its first query on."""
    return (tile.b * work.heads_q + tile.h) * work.m_tiles + tile.row // tokens


@gluon.jit
def tile_of_place(place, work, tokens: gl.constexpr):
    """The tile with this `place_of`."""
    head = place // work.m_tiles
    b = head // work.heads_q
    return Tile(b, head - b * work.heads_q, (place - head * work.m_tiles) * tokens)


@gluon.jit
def fetch_next(counter, work, number):
    """Starts fetching the tile number after `number`, unless that is past the end. The answer, in the first lane of
    [32], goes to `resolve_next`; for a scalar the warp would wait here. The counter orders no other memory, hence
    relaxed."""
    lane = gl.arange(0, 32, LANES)
    wanted = (lane == 0) & (number < work.total())
    return gl.atomic_add(counter + lane, 1, mask=wanted, sem="relaxed")


@gluon.jit
def resolve_next(counter, work, number, taken):
    """The tile number of `fetch_next`'s answer `taken`; the last answer of a launch resets the counter."""
    total = work.total()
    taken = gl.max(gl.where(gl.arange(0, 32, LANES) == 0, taken, 0), 0)
    gl.atomic_xchg(counter, 0, mask=(number < total) & (taken == total - 1), sem="relaxed")
    return gl.where(number < total, taken + gl.num_programs(0), total)


@gluon.jit
def put_field(slot, value):
    """Writes one field; called by one warp."""
    slot.store(gl.full([1], value, gl.int32, LANES))


@gluon.jit
def get_field(slot):
    """Reads one field; called by four warps."""
    return gl.max(slot.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
