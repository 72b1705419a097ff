"""Every configuration that a Hopper problem may be tried with, by name: what `tune` and `bench.choices` measure.

A dense prefill has other tiles with the deepest rings that fit, query heads packed into a tile, and keys in parts;
decode has longer and shorter key tiles, one or two CTAs an SM and another number of CTAs, which is where Stream-K cuts
keys. A dense problem of few queries has the prefill kernel, too. Names are all that is kept of a measurement, so a name
means one configuration, made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from warpattn.problem import Problem, is_latent
from warpattn.problem.arch import Arch
from warpattn.problem.launch import Choice

from .decode import choice as decode
from .decode.config import DecodeConfig
from .prefill.choice import LEAST_KEYS, KeyTiles, packable, row_words, shared_out, tiling, usual_config
from .prefill.choice import choose as choose_prefill
from .prefill.config import REGISTERS, SM90Config, TileShape, with_tile
from .prefill.launch import arrange
from .prefill.rates import RATES

TRIED = "tried"
PACKED = (1, 4, 8)  # query heads of a tile
PARTS = (2, 4, 8)  # of the keys of a tile
TILE_KEYS = (32, 64, 128)
FEW_KEYS = 1024  # of a row, up to which tiles of 32 keys are tried
MOST_TILES = 264  # whose keys are tried in parts
LONGEST_TILE = 128  # keys of decode


@lru_cache(64)
def candidates(problem: Problem, target: Arch) -> dict[str, Choice]:
    """All choices for a `problem` by their names; none where the kernel has one configuration: ragged queries, chunks
    over pages, latent attention. The plan's own choice may be one of them."""
    found: dict[str, Choice] = {}
    few = problem.seq_q <= decode.MAX_TOKENS and decode.takes(problem) and not is_latent(problem)
    if few and problem.kind in ("dense", "paged"):
        found |= {described(choice): choice for choice in _of_decode(problem, target)}
    if problem.kind == "dense" and not is_latent(problem):
        # Of few queries the plan's own prefill only: they are one row tile, so tiles hardly differ.
        prefill = [choose_prefill(problem, target)] if few else _of_prefill(problem, target)
        found |= {described(choice): choice for choice in prefill}
    return found


def described(choice: Choice) -> str:
    """A configuration in a few letters."""
    c = choice.config
    if choice.kernel == "decode":
        return f"decode {c.rows}x{c.block_n} kv{c.stages} ctas{c.ctas} grid{choice.grid[0]}"
    text = f"{c.block_m}x{c.block_n} kv{c.kv_stages} q{c.q_stages} heads{c.packed} parts{choice.partitions}"
    return text + (f" ctas{c.ctas}" if c.ctas > 1 else "")


def _of_prefill(problem: Problem, target: Arch) -> Iterator[Choice]:
    """Those of dense prefill."""
    heads_of_tile = [n for n in packable(problem) if n in PACKED]
    for config in _tiles(problem):
        why = TRIED, row_words(tiling(config))
        for heads in heads_of_tile:
            packed = replace(config, packed=heads)
            whole = arrange(problem, target, packed, why)
            yield whole
            few = whole.order.heads // heads * whole.order.m_tiles <= MOST_TILES
            for parts in (n for n in PARTS if few and n * LEAST_KEYS <= problem.seq_k and config.ctas == 1):
                yield arrange(problem, target, shared_out(packed), why, parts)


def _tiles(problem: Problem) -> Iterator[SM90Config]:
    """Configurations of dense prefill with other tiles, of one head each; 8-bit operands and head dims without a
    measured row keep the usual one."""
    usual, _ = usual_config(problem, problem.seq_q)
    if usual.eight_bit is not None or usual.wide > max(RATES):
        yield usual
        return
    own = KeyTiles(problem).candidate(tiling(usual))
    few_keys = own.most_keys <= FEW_KEYS + 2 * max(usual.tokens, usual.block_n)  # of a row, for rows of one tile
    for consumers, keys in ((c, n) for c in REGISTERS for n in TILE_KEYS):
        if (keys > min(TILE_KEYS) or few_keys) and (keys == 64 or consumers > 1):
            config = with_tile(usual, TileShape(consumers, keys, 2 if consumers == 1 else 1))
            if config is not None:
                yield config


def _of_decode(problem: Problem, target: Arch) -> Iterator[Choice]:
    """Those of decode."""
    for config in _decode_tiles(problem):
        grids = {decode.grid_size(config, target), target.processors * config.ctas}
        yield from (decode.finished(problem, target, config, grid) for grid in sorted(grids))


def _decode_tiles(problem: Problem) -> Iterator[DecodeConfig]:
    """Configurations of decode with other key tiles; pages that are gathered row by row and 8-bit keys have one."""
    usual = decode.tiles_of(problem)
    shorter = decode.shorter_tiles(usual)
    yield usual
    if shorter != usual:
        yield shorter
    if usual.gathers or usual.eight_bit is not None:
        return
    for ctas in (1, 2):
        other = decode.tiles_of(problem, ctas)
        fits = other.stages > 1 and (other.smem_bytes + decode.SLACK + 1024) * ctas <= decode.SM_SMEM
        if other != usual and fits and (ctas == 1 or max(other.padded_qk, other.padded_v) <= LONGEST_TILE):
            yield other
