"""Shared memory of Hopper's prefill with 8-bit tensors: the 8-bit view of ring slots, scales beside the rings, and
transposed values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ....nvidia.clipped_rows import stacked
from ....pieces.scales import OfTokens
from ...layouts import element_type

CONVERTING = gl.constexpr(4)  # warps of the converting warpgroup
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def query_type(config):
    """Type of queries in memory."""
    return stored_type(config) if config.eight_bit is not None and config.eight_bit.queries else element_type(
        config.element
    )


@gluon.constexpr_function
def stored_type(config):
    """Type of K and V in memory."""
    return element_type(config.element if config.eight_bit is None else config.eight_bit.element)


@gluon.aggregate
class NarrowRing:
    """A ring of 16-bit tiles as TMA fills it: 8-bit rows in each part's first half, and a third barrier (`loaded`)."""

    ring: gl.base_value  # StagedPipeline or FreeSlots
    config: gl.constexpr
    number: gl.constexpr  # 0 for K, 1 for V

    @gluon.jit
    def producer_acquire(self, state):
        """Wait until a slot is empty; returns the barrier that its 8-bit tile completes."""
        self.ring.producer_acquire(state)
        return self.loaded(state)

    @gluon.jit
    def loaded(self, state):
        """The barrier that completes when a slot's 8-bit tile has arrived."""
        return self.ring.bars.index(state.index + 2 * self.ring.stages)

    @gluon.jit
    def wait(self, state):
        """Wait until a slot's 8-bit tile has arrived."""
        mbarrier.wait(self.loaded(state), state.phase)

    @gluon.jit
    def tile(self, state):
        """The 8-bit parts of a slot."""
        return first_halves(self.ring.tile(state), self.config)


@gluon.aggregate
class FreeNarrowRing(NarrowRing):
    """`NarrowRing` for recompute.py, after the roles have ended: TMA completes the full barrier itself."""

    @gluon.jit
    def loaded(self, state):
        return self.ring.full(state.index)


@gluon.jit
def first_halves(wide, config: gl.constexpr):
    """The first halves of a tile's 16-bit parts, viewed as 8-bit parts."""
    parts = ()
    for part in gl.static_range(len(wide)):
        parts += (first_half(wide[part], stored_type(config)),)
    return parts


@gluon.jit
def first_half(wide, dtype: gl.constexpr):
    """The first half of a 16-bit part, viewed as an 8-bit part."""
    box: gl.constexpr = wide.shape
    return wide.reinterpret(dtype, stacked(2, box), gl.NVMMASharedLayout.get_default_for(box, dtype)).index(0)


@gluon.jit
def arriving_queries(tile, config: gl.constexpr):
    """The parts of a Q slot as TMA fills them, perhaps with 8 bits."""
    if config.widens_queries:
        return first_halves(tile, config)
    else:
        return tile


@gluon.jit
def make_scales(config: gl.constexpr):
    """Allocates slots for scales of K's and V's tokens: `OfTokens` of [stages * blocks, N]; () without such scales."""
    if config.scale_bytes == 0:
        return ()
    else:
        k_rows: gl.constexpr = config.eight_bit.blocks("k", config.padded_qk) + (config.eight_bit.columns("k") > 0)
        k_shape: gl.constexpr = [config.kv_stages * k_rows, config.block_n]
        v_shape: gl.constexpr = [config.kv_stages * config.eight_bit.blocks("v", config.padded_v), config.block_n]
        k = gl.allocate_shared_memory(gl.float32, k_shape, PLAIN)
        return OfTokens(k, gl.allocate_shared_memory(gl.float32, v_shape, PLAIN))


@gluon.jit
def make_factors(config: gl.constexpr, unused):
    """Allocates slots for the factors of scores, see `query_factors` of the config; `unused` where there are none."""
    if config.query_factors == 0:
        return unused
    else:
        shape: gl.constexpr = [config.q_stages * config.consumers, config.query_factors]
        return gl.allocate_shared_memory(gl.float32, shape, PLAIN)


@gluon.aggregate
class ValueColumns:
    """Loads V of a dense batch that transpose_values.py has transposed to (batch, dim, heads, keys)."""

    maps: gl.tuple

    @gluon.jit
    def corner(self, ctx, tile, key_tile):
        """Coordinates of a key tile's values in the tensor of `maps`."""
        return tile.b, 0, tile.h // ctx.work.group, key_tile * ctx.config.block_n

    @gluon.jit
    def load(self, ctx, ring, state, tile, key_tile, nbytes: gl.constexpr):
        """Loads the values of one key tile into a slot."""
        full = ring.producer_acquire(state)
        mbarrier.expect(full, nbytes)
        tma.async_load(self.maps[0], self.corner(ctx, tile, key_tile), full, ring.tile(state)[0])
