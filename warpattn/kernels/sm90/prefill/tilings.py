"""Tiles that the plan of a dense prefill on Hopper may choose from: the usual ones of a pair of head dims, and others
with a measured rate (rates.py) that fit registers and shared memory, for one query head or several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from warpattn.kernels.topology import Registers
from warpattn.problem.element import Element

from ..operand_format import OperandFormat
from ..widths import split_dim, split_values
from .config import ALIGNMENT, OTHER_REGISTERS, SMEM_LIMIT, SM90Config
from .rates import Rate, TileShape, rate_of, row_words, tiles_of

LEAST_STORED = 16  # columns of the output
WIDE_QUERIES = 256  # columns: of more, shared memory has a query tile and 32 keys at a time
SHORT_ROWS = 2048  # queries up to which, at head dim 64, 128-row tiles fit a causal triangle better than 192-row ones
LENGTHS_SLOTS = 4  # of rings at least where lengths are on the device: keys may come page by page
REGISTERS = {1: Registers(232, 24), 2: Registers(240, 24), 3: Registers(160, 32), 4: Registers(112, 32)}  # by consumers


def choose_config(element: Element, dim_qk: int, dim_v: int, seq_q: int, masked: bool) -> tuple[SM90Config, str]:
    """The measured best configuration for a pair of head dims, and one sentence why (cycles: bench/notes.md).

    `masked`: the mask hides some keys, so tiles differ in length.
    """
    qk, v = split_dim(dim_qk), split_values(dim_v)
    wide, held = max(sum(qk), sum(v)), int(len(qk) > 1)
    operands = OperandFormat(element, dim_qk, dim_v)
    if sum(qk) > WIDE_QUERIES:
        why = f"queries of > {WIDE_QUERIES} columns: 32 keys a tile, one query tile, output stored in column blocks"
        return stored(SM90Config(operands, 2, 32, 2, 1, v, Registers(240, 24), False)), why
    if wide <= 64 and masked and seq_q <= SHORT_ROWS:
        why = f"head dim <= 64, a mask and at most {SHORT_ROWS} queries: 128-row tiles waste less of the diagonal"
        return SM90Config(operands, 2, 128, 4, 2, v, Registers(240, 24), True), why
    if wide <= 64:
        why = "head dim <= 64: exponentials take as long as products, so three warpgroups hide them better"
        return SM90Config(operands, 3, 128, 2, 2, v, Registers(160, 32), True), why
    if wide <= 128:
        why = "head dim <= 128: two warpgroups and 128 keys fill registers and shared memory with two query tiles"
        return SM90Config(operands, 2, 128, _stages(wide), 2, v, Registers(240, 24), True), why
    if wide <= 160 or (wide <= 192 and sum(v) <= 128):
        why = "head dim <= 160, or <= 192 with values of <= 128: 128 keys a tile, with one query tile they fit"
        held = held if wide > 160 else 0
        return stored(SM90Config(operands, 2, 128, 2, 1, v, Registers(240, 24), True, held_parts=held)), why
    if wide < 256:
        why = "head dim > 160: 64 keys a tile, one query tile, the last part of Q in registers"
        return stored(SM90Config(operands, 2, 64, 2, 1, v, Registers(240, 24), True, held_parts=held)), why
    why = "head dim > 224: 64 keys a tile, one query tile, output stored in column blocks, to fit shared memory"
    return stored(SM90Config(operands, 2, 64, 2, 1, v, Registers(240, 24), False)), why


def _stages(columns: int) -> int:
    """Slots of the rings of K and V with 128 keys a tile: 3 instead of 2 gained 2 % at head dim 96 (H200)."""
    return 4 if columns <= 80 else 3 if columns <= 96 else 2


def stored(config: SM90Config) -> SM90Config:
    """The config with as many columns of the output stored at once as there is memory for; no fewer than are fast."""
    if config.smem_bytes + ALIGNMENT <= SMEM_LIMIT:
        return config
    widest = 128 if config.block_n == 64 else 64
    return replace(config, store_parts=(min(widest, config.v_parts[-1]),))


def fitted(config: SM90Config) -> SM90Config:
    """The same with as few as it takes, where scales of 8-bit tiles need memory, too."""
    config = stored(config)
    while config.smem_bytes + ALIGNMENT > SMEM_LIMIT and config.store_parts[0] > LEAST_STORED:
        config = replace(config, store_parts=(config.store_parts[0] // 2,))
    return config


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
