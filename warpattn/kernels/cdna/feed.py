"""Feeds: Q·Kᵀ and P·V of a key tile with each of the three kinds of buffers, strip by strip.

The protocol (RegisterFeed, SerialFeed and RingFeed implement it):

      start(span, first)              -> stage           request the first loads
      scores(q, visit, stage, scales) -> S, stage        S = Q·Kᵀ of a tile, with scales of blocks of a key's columns
      values(p, o, visit, stage)      -> O, stage        O += P·V of the same tile
      finish()                                           wait for loads that nothing uses

`scores` and `values` alternate; `stage` carries the strip that is in flight in registers or the slot, and the page
numbers of the tile that is loaded next, which are looked up a tile early. Loads past the last tile have a key past the
end, where they read zeros or the last key, so the last tile is no special case.

      RegisterFeed   strip j+1 is loaded into registers while j goes through LDS; the last strip of K overlaps the first
                     of V, the last of V the first of the next K
      SerialFeed     load, wait, multiply; load, wait, multiply
      RingFeed       the next K and V are in flight during the whole tile
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from ..amd.kv_buffer import (
    KVBufferLDS,
    KVBufferRing,
    KVSource,
    allocate,
    make_register_buffer,
    slot_after,
    slot_before,
)
from ..pieces.element_type import element_type
from .layouts import output_operand, product_layout, scores_operand


@gluon.aggregate
class Visit:
    """A key tile in the loop, by first keys; a key past the end where there is no such tile."""

    key: gl.tensor  # of this tile
    load_key: gl.tensor  # of the tile that is loaded meanwhile, `config.tiles_ahead` tiles later
    page_key: gl.tensor  # of the tile after that, whose pages are looked up meanwhile


@gluon.aggregate
class RegisterFeed:
    k: gl.base_value  # KVBuffer or KVBufferOwn
    v: gl.base_value
    rope: gl.base_value  # of the last strip of K where it is in a tensor of its own, else ()
    k_source: KVSource
    v_source: KVSource
    rope_source: gl.base_value  # KVSource of that strip, or ()
    config: gl.constexpr

    @gluon.jit
    def pages(self, key):
        """Pages of K, of V and of the rotary strip of K, if it is apart, of the tile at `key`."""
        k, v = self.k.pages(self.k_source, key), self.v.pages(self.v_source, key)
        if self.config.rope is None:
            return k, v
        else:
            return k, v, self.rope.pages(self.rope_source, key)

    @gluon.jit
    def load_keys(self, key, strip: gl.constexpr, pages):
        """Request strip number `strip` of K."""
        if self.config.rope is not None and strip == self.config.k.strips - 1:
            return self.rope.load_from_dram(self.rope_source, key, 0, pages[2])
        else:
            return self.k.load_from_dram(self.k_source, key, strip, pages[0])

    @gluon.jit
    def keys(self, stage, strip: gl.constexpr):
        """A strip of K as an operand."""
        layout: gl.constexpr = scores_operand(self.config, 1)
        if self.config.rope is not None and strip == self.config.k.strips - 1:
            return self.rope.operand(stage, layout)
        else:
            return self.k.operand(stage, layout)

    @gluon.jit
    def start(self, span, first):
        """Request the first strip of K."""
        key = first_key(span, first, self.k_source.keys, self.config)
        pages = self.pages(key)
        return self.k.load_from_dram(self.k_source, key, 0, pages[0]), pages

    @gluon.jit
    def scores(self, q, visit, stage, scales):
        """S = Q·Kᵀ, given the first strip of K; also returns that of V.

        The table is read after all strips of this tile have been requested: memory answers in order, so no wait for a
        strip includes the table.
        """
        strip, pages = stage
        after = pages
        s = no_scores(self.config)
        part = s
        columns: gl.constexpr = self.config.scaled_columns("k")
        strips: gl.constexpr = self.config.k.strips
        for j in gl.static_range(strips):
            if j + 1 < strips:
                ahead = self.load_keys(visit.key, j + 1, pages)
            else:
                ahead = self.v.load_from_dram(self.v_source, visit.key, 0, pages[1])
                after = self.pages(visit.load_key)
            k = self.keys(strip, j)
            if j * self.config.buffers.k_strip >= self.config.key_blocks * columns:  # none, or 16 bits beside latents
                s = cdna3.mfma(q_strip(q, self.config, j), k, s)
            else:
                part = cdna3.mfma(q_strip(q, self.config, j), k, part)
                if (j + 1) * self.config.buffers.k_strip % columns == 0:
                    s += part * of_keys(scales[j * self.config.buffers.k_strip // columns], self.config)
                    part = no_scores(self.config)
            strip = ahead
        return s, (strip, pages, after)

    @gluon.jit
    def values(self, p, o, visit, stage):
        """O += P·V, given the first strip of V; also returns that of the next K."""
        strip, pages, after = stage
        strips: gl.constexpr = self.config.v.strips
        for j in gl.static_range(strips):
            if j + 1 < strips:
                ahead = self.v.load_from_dram(self.v_source, visit.key, j + 1, pages[1])
            else:
                ahead = self.k.load_from_dram(self.k_source, visit.load_key, 0, after[0])
            v = self.v.operand(strip, output_operand(self.config, 1))
            o = cdna3.mfma(p_strip(p, self.config, j), v, o)
            strip = ahead
        return o, (strip, after)

    @gluon.jit
    def finish(self):
        """No copy to LDS is in flight."""


@gluon.aggregate
class SerialFeed:
    k: KVBufferLDS
    v: KVBufferLDS
    k_source: KVSource
    v_source: KVSource
    config: gl.constexpr

    @gluon.jit
    def start(self, span, first):
        """Nothing is loaded ahead."""
        return 0

    @gluon.jit
    def scores(self, q, visit, stage, scales):
        """S = Q·Kᵀ."""
        s = no_scores(self.config)
        strips: gl.constexpr = self.config.k.strips
        for j in gl.static_range(strips):
            self.k.load_from_dram(self.k_source, visit.key, j)
            self.k.wait_for()
            s = cdna3.mfma(q_strip(q, self.config, j), self.k.load_from_shared(scores_operand(self.config, 1)), s)
        return s, stage

    @gluon.jit
    def values(self, p, o, visit, stage):
        """O += P·V."""
        strips: gl.constexpr = self.config.v.strips
        for j in gl.static_range(strips):
            self.v.load_from_dram(self.v_source, visit.key, j)
            self.v.wait_for()
            o = cdna3.mfma(p_strip(p, self.config, j), self.v.load_from_shared(output_operand(self.config, 1)), o)
        return o, stage

    @gluon.jit
    def finish(self):
        """No copy to LDS is in flight."""


@gluon.aggregate
class RingFeed:
    k: KVBufferRing
    v: KVBufferRing
    k_source: KVSource
    v_source: KVSource
    config: gl.constexpr

    @gluon.jit
    def load(self, key, slot, pages):
        """Start the DMA of K and V of the tile at `key`."""
        self.k.load_from_dram(self.k_source, key, slot, pages[0])
        self.v.load_from_dram(self.v_source, key, slot, pages[1])

    @gluon.jit
    def pages(self, key):
        """Pages of K and of V of the tile at `key`."""
        return self.k.pages(self.k_source, key), self.v.pages(self.v_source, key)

    @gluon.jit
    def start(self, span, first):
        """Start the DMA of the first tiles."""
        pages = self.pages(first_key(span, first, self.k_source.keys, self.config))
        ahead: gl.constexpr = self.config.tiles_ahead
        for i in gl.static_range(ahead):
            after = self.pages(first_key(span, first + i + 1, self.k_source.keys, self.config))
            self.load(first_key(span, first + i, self.k_source.keys, self.config), i, pages)
            pages = after
        return pages, gl.to_tensor(0)

    @gluon.jit
    def scores(self, q, visit, stage, scales):
        """S = Q·Kᵀ, with the tile's V and all of later tiles in flight.

        The copies start before K is read, so that the barrier after the wait also orders them after the last reads of
        their slot: two barriers a tile instead of three.
        """
        pages, slot = stage
        self.k.wait_for(self.config.k_in_flight)
        after = self.pages(visit.page_key)
        self.load(visit.load_key, slot_before(slot, self.config.buffers.slots), pages)
        k = self.k.load_from_shared(slot, scores_operand(self.config, 1))
        return cdna3.mfma(q, k, no_scores(self.config)), (after, slot)

    @gluon.jit
    def values(self, p, o, visit, stage):
        """O += P·V, with all of later tiles in flight."""
        pages, slot = stage
        self.v.wait_for(self.config.v_in_flight)
        v = self.v.load_from_shared(slot, output_operand(self.config, 1))
        return cdna3.mfma(p_strip(p, self.config, 0), v, o), (pages, slot_after(slot, self.config.buffers.slots))

    @gluon.jit
    def finish(self):
        """Wait for the loads past the last tile: LDS belongs to another workgroup afterwards."""
        async_copy.wait_group(0)


@gluon.jit
def make_feed(k_source, v_source, rope_source, config: gl.constexpr):
    """Buffers of the config's kind."""
    size: gl.constexpr = k_source.page_size
    if config.buffers.kind == "registers":
        k, v = make_register_buffer(config.k, size), make_register_buffer(config.v, size)
        rope = ()
        if config.rope is not None:
            rope = make_register_buffer(config.rope, size)
        return RegisterFeed(k, v, rope, k_source, v_source, rope_source, config)
    else:
        k, v = allocate(config.k, size), allocate(config.v, size)
        if config.buffers.kind == "lds":
            return SerialFeed(KVBufferLDS(k, config.k), KVBufferLDS(v, config.v), k_source, v_source, config)
        else:
            return RingFeed(KVBufferRing(k, config.k), KVBufferRing(v, config.v), k_source, v_source, config)


@gluon.jit
def first_key(span, i, keys, config: gl.constexpr):
    """First key of the tile visited as number `i`; the end of the keys if there is no such tile."""
    return gl.where(i < span.total, span.key_tile(i) * config.block_n, keys)


@gluon.jit
def visit_of(span, i, keys, config: gl.constexpr):
    """The visit of tile number `i` of a span."""
    ahead = i + config.tiles_ahead
    key = span.key_tile(i) * config.block_n
    return Visit(key, first_key(span, ahead, keys, config), first_key(span, ahead + 1, keys, config))


@gluon.jit
def no_scores(config: gl.constexpr):
    """S before any product."""
    return gl.zeros([config.block_m, config.block_n], gl.float32, product_layout(config))


@gluon.jit
def of_keys(scales, config: gl.constexpr):
    """Scales [N] of a tile's keys, a lane each, as a factor [1, N] of scores."""
    return gl.convert_layout(scales, gl.SliceLayout(0, product_layout(config)))[None, :]


@gluon.jit
def q_strip(q, config: gl.constexpr, strip: gl.constexpr):
    """The columns of Q [M, D] that are multiplied with a strip of K."""
    if config.k.strips == 1:
        return q
    else:
        return gl.amd.slice(q, [config.block_m, config.buffers.k_strip], [0, strip * config.buffers.k_strip])


@gluon.jit
def p_strip(p, config: gl.constexpr, strip: gl.constexpr):
    """The columns of P [M, N] that are multiplied with a strip of V, as an operand."""
    if config.v.strips > 1 and config.waves_n > 1:  # a strip's columns are in several waves
        whole = gl.convert_layout(rounded(p, config), output_operand(config, 0))
        return gl.amd.slice(whole, [config.block_m, config.buffers.v_strip], [0, strip * config.buffers.v_strip])
    else:
        if config.v.strips > 1:
            p = gl.amd.slice(p, [config.block_m, config.buffers.v_strip], [0, strip * config.buffers.v_strip])
        return gl.convert_layout(rounded(p, config), output_operand(config, 0))


@gluon.jit
def rounded(p, config: gl.constexpr):
    """P in the operands' type, to the nearest, ties to even.

    gfx942 has no instruction for bf16 and the compiler's five keep NaNs apart; three do for P, whose NaNs come from the
    operands' own, so that their low bits are 0.
    """
    if config.arch == "gfx942" and config.element.name == "bf16":
        bits = p.to(gl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
    else:
        return p.to(element_type(config.element))
