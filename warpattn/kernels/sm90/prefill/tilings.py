"""Tiles that the plan of a dense prefill on Hopper may choose from: those with a measured rate (rates.py) that fit
registers and shared memory, for one query head or several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from warpattn.kernels.topology import Registers

from .config import ALIGNMENT, OTHER_REGISTERS, SMEM_LIMIT, SM90Config, stored
from .rates import Rate, TileShape, rate_of, row_words, tiles_of

LENGTHS_SLOTS = 4  # of rings at least where lengths are on the device: keys may come page by page
REGISTERS = {1: Registers(232, 24), 2: Registers(240, 24), 3: Registers(160, 32), 4: Registers(112, 32)}  # by consumers


class Tiling(NamedTuple):
    """A configuration, and how long an SM takes for its tiles."""

    config: SM90Config
    rate: Rate
    row: str  # of the measured table, for people
    rows: int  # of a tile
    tokens: int  # of a tile, for each head in it
    keys: int
    packed: int  # heads


def tile_shape(config: SM90Config) -> TileShape:
    """What a rate depends on, beside the head dims."""
    return TileShape(config.consumers, config.block_n, config.ctas)


@lru_cache(512)
def tiling(config: SM90Config) -> Tiling:
    """That of a configuration."""
    wide, tile = config.wide, tile_shape(config)
    rate, row = rate_of(wide, tile), row_words(wide, tile)
    return Tiling(config, rate, row, config.block_m, config.tokens, config.block_n, config.packed)


@lru_cache(256)
def tilings_of(
    usual: SM90Config, heads: tuple[int, ...], counted: bool, lengths: bool, same_keys: bool
) -> list[Tiling]:
    """The usual configuration and those with other tiles, each with so many heads in a tile. They depend on head dims
    and dtypes and not on sizes, so they are remembered."""
    tiles = tiles_of(usual.wide, lengths) if counted else ()
    taken = (tile for tile in tiles if tile.keys == usual.block_n or not same_keys)
    configs = [usual, *other_tiles(usual, taken, LENGTHS_SLOTS if lengths else 2)]
    return [tiling(replace(config, packed=n)) for config in configs for n in heads]


def other_tiles(usual: SM90Config, tiles: Iterable[TileShape], slots: int = 2) -> Iterator[SM90Config]:
    """Configurations with those of the `tiles` that registers and shared memory hold."""
    if usual.eight_bit is None:
        for tile in tiles:
            if tile != tile_shape(usual):
                yield from with_tile(usual, tile, slots)


def with_tile(usual: SM90Config, tile: TileShape, slots: int = 2) -> Iterator[SM90Config]:
    """The configuration with another tile and the deepest rings that shared memory holds, of `slots` or 256 keys at
    first, if that holds two slots and registers the tile."""
    registers = REGISTERS[tile.consumers]
    if tile.keys // 2 + usual.padded_v // 2 + OTHER_REGISTERS > registers.consumer:
        return
    if tile.ctas == 1:
        registers = replace(registers, producer=max(registers.producer, usual.registers.producer))
    config = replace(
        usual, consumers=tile.consumers, block_n=tile.keys, store_parts=usual.v_parts, ctas=tile.ctas,
        registers=registers, take_turns=tile.consumers in (2, 3),
    )  # fmt: skip
    depths = dict.fromkeys((max(slots, 256 // tile.keys), 4, 3, 2))
    rings = (stored(replace(config, q_stages=q, kv_stages=kv)) for q in (2, 1) for kv in depths)
    fitting = (ring for ring in rings if (ring.smem_bytes + 2 * ALIGNMENT) * ring.ctas <= SMEM_LIMIT)
    yield from islice(fitting, 1)


@lru_cache(256)
def faster(usual: SM90Config, lengths: bool) -> float:
    """How much less time a key may take in another tile, as a share."""
    own = tiling(usual).rate.key
    return 1 - min([own, *(rate_of(usual.wide, tile).key for tile in tiles_of(usual.wide, lengths))]) / own
