"""Lists every configuration that `tune` and `bench.choices` measure for a problem on Hopper, by name.

Candidates of dense prefill differ in tile (with the deepest rings that fit), packed query heads and split keys. Those
of decode differ in key tile, CTAs an SM and grid, which decides where Stream-K cuts the keys. A dense problem of
few queries also has the prefill kernel as a candidate. Records of measurements keep only names, so a name has to mean
one configuration, the one made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from warpattn.problem import Problem, is_latent
from warpattn.problem.arch import Arch
from warpattn.problem.launch import MOST_DECODED, Choice

from .decode import choice as decode
from .decode.config import DecodeConfig
from .prefill.choice import (
    LEAST_KEYS,
    KeyTiles,
    best_ctas,
    packable,
    row_words,
    shared_out,
    tiling,
    usual_config,
)
from .prefill.choice import choose as choose_prefill
from .prefill.config import REGISTERS, SM90Config, TileShape, with_tile
from .prefill.launch import arrange
from .prefill.rates import RATES

TRIED = "tried"
PACKED = (1, 3, 4, 5, 6, 7, 8)  # query heads in a tile
PARTS = (2, 4, 8)  # parts that the keys of a tile are split into
TILE_KEYS = (32, 64, 128)
FEW_KEYS = 1024  # tiles of 32 keys are tried only for rows of at most so many keys
MOST_TILES = 264  # split keys are tried only with at most so many tiles
LONGEST_TILE = 128  # decode with two CTAs an SM is tried only up to this padded head dim


@lru_cache(64)
def candidates(problem: Problem, target: Arch) -> dict[str, Choice]:
    """Returns all choices for a `problem` by name; none where the kernel has only one configuration (ragged queries,
    chunks over pages, latent attention). The plan's own choice may be among them."""
    found: dict[str, Choice] = {}
    few = problem.seq_q <= MOST_DECODED and decode.takes(problem) and not is_latent(problem)
    if few and problem.kind in ("dense", "paged"):
        found |= {described(choice): choice for choice in _of_decode(problem, target)}
    if problem.kind == "dense" and not is_latent(problem):
        # Few queries fit one row tile, so tiles hardly differ: only the plan's own prefill is tried.
        prefill = [choose_prefill(problem, target)] if few else _of_prefill(problem, target)
        found |= {described(choice): choice for choice in prefill}
    return found


def described(choice: Choice) -> str:
    """The short name of a choice."""
    c = choice.config
    if choice.kernel == "decode":
        return f"decode {c.rows}x{c.block_n} kv{c.stages} ctas{c.ctas} grid{choice.grid[0]}"
    text = f"{c.block_m}x{c.block_n} kv{c.kv_stages} q{c.q_stages} heads{c.packed} parts{choice.partitions}"
    return text + (f" ctas{c.ctas}" if c.ctas > 1 else "")


def _of_prefill(problem: Problem, target: Arch) -> Iterator[Choice]:
    """Yields the choices of dense prefill."""
    heads_of_tile = [n for n in packable(problem) if n in PACKED]
    counts = KeyTiles(problem)
    for config in _tiles(problem):
        why = TRIED, row_words(tiling(config))
        for heads in heads_of_tile:
            packed = replace(config, packed=heads)
            ctas = best_ctas(problem, counts.candidate(tiling(packed)), target)
            whole = arrange(problem, target, packed, why, ctas=ctas)
            yield whole
            few = whole.order.heads // heads * whole.order.m_tiles <= MOST_TILES
            for parts in (n for n in PARTS if few and n * LEAST_KEYS <= problem.seq_k and config.ctas == 1):
                yield arrange(problem, target, shared_out(packed), why, parts)


def _tiles(problem: Problem) -> Iterator[SM90Config]:
    """Yields configurations of dense prefill with other tiles, one head in each. 8-bit operands and head dims without
    measured rates keep the usual tile."""
    usual, _ = usual_config(problem, problem.seq_q)
    if usual.eight_bit is not None or usual.wide > max(RATES):
        yield usual
        return
    own = KeyTiles(problem).candidate(tiling(usual))
    few_keys = own.most_keys <= FEW_KEYS + 2 * max(usual.tokens, usual.block_n)  # a tile's span exceeds its rows'
    for consumers, keys in ((c, n) for c in REGISTERS for n in TILE_KEYS):
        if (keys > min(TILE_KEYS) or few_keys) and (keys == 64 or consumers > 1):
            config = with_tile(usual, TileShape(consumers, keys, 2 if consumers == 1 else 1))
            if config is not None:
                yield config


def _of_decode(problem: Problem, target: Arch) -> Iterator[Choice]:
    """Yields the choices of decode."""
    for config in _decode_tiles(problem):
        grids = {decode.grid_size(config, target), target.processors * config.ctas}
        yield from (decode.finished(problem, target, config, grid) for grid in sorted(grids))


def _decode_tiles(problem: Problem) -> Iterator[DecodeConfig]:
    """Yields configurations of decode with other key tiles; 8-bit keys and pages gathered row by row have only one."""
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
