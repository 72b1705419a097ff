"""The choice of a dense prefill on Hopper: heads packed into a tile, keys split, short problems; grid and order.

The work of each candidate is counted with the mask's own span, and weighed by times measured on an H200
(bench/notes.md, experiments 119 to 122). Dense problems alone are counted: of others the host knows no lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.kernels.pieces.span_tiles import SpanTiles, span_tiles
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.element import ELEMENT_OF
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, PlanOptions
from warpattn.problem.operands import COPY_RULE

from .config import SM90Config, is_masked, usual_config

MOST_PACKED = 16  # query heads of a tile
GAIN = 0.9  # of the time of the usual configuration that another one must be estimated to take at most
SHORT_KEYS = 1024  # keys up to which half tiles are faster if they leave no SM without work
LEAST_KEYS = 1024  # of a part
FEW = 2  # tiles an SM up to which keys may be split
MOST_PARTS = 64
PART_US = 1.0  # of a part: its first keys and its output in fp32
COMBINE_US, COMBINE_BYTES = 2.5, 3e6  # of the second launch: at least, and bytes a µs


class Rate(NamedTuple):
    """Nanoseconds that an SM takes for a row of a tile: once, for each key, and more for each key of a masked tile."""

    row: float
    key: float
    masked: float


class Candidate(NamedTuple):
    """A configuration, and the key tiles of its row tiles."""

    config: SM90Config
    rate: Rate
    tiles: SpanTiles
    rows: int  # of a tile

    def microseconds(self) -> Tensor:
        """Time of each row tile of a head, or of the heads packed into it."""
        keys, masked = self.tiles.total * self.config.block_n, self.tiles.masked * self.config.block_n
        return self.rows * (self.rate.row + keys * self.rate.key + masked * self.rate.masked) / 1000

    def waste(self, seq_q: int) -> float:
        """At most this share of the work is for rows past the last query or in masked tiles."""
        empty = 1 - seq_q / (len(self.tiles.total) * self.rows)
        return empty + self.tiles.masked.sum().item() / self.tiles.total.sum().item()

    def head_microseconds(self) -> float:
        """Time of all row tiles, for one head."""
        return self.microseconds().sum().item() / self.config.packed


def choose(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """The choice for a dense `problem`. With `batch_invariant` it is that of one of its sequences alone, so that its
    parts do not depend on the others."""
    alone = replace(problem, batch=1) if options.batch_invariant else problem
    usual, why = usual_config(problem, problem.seq_q)
    short = _short(alone, usual, target)
    if short is not None:
        return arrange(problem, target, short, "few tiles of few keys: 64-row tiles, two CTAs an SM, end sooner")
    best, why = pack(problem, usual, why)
    parts, split_why = split(alone, best, target)
    if parts == 1:
        return arrange(problem, target, best.config, why)
    return arrange(problem, target, shared_out(best.config), f"{why}; {split_why}", parts)


def shared_out(config: SM90Config) -> SM90Config:
    """The same with the keys of a tile in parts, whose fp32 columns go out in blocks that need no more memory."""
    columns = 1 << (sum(config.store_parts) // 2).bit_length() - 1
    return replace(config, split=True, store_parts=(min(columns, config.v_parts[-1]),))


def _short(problem: Problem, usual: SM90Config, target: Arch) -> SM90Config | None:
    """Half tiles for short problems whose tiles do not fill the SMs twice."""
    wide = usual.wide
    tiles = problem.batch * problem.heads_q * -(-problem.seq_q // 128)
    masked = is_masked(problem) or problem.seq_k <= SHORT_KEYS // 2
    if usual.eight_bit is not None:
        return None
    if wide > 128 or tiles > target.processors or problem.seq_k > SHORT_KEYS or not masked or problem.seq_q <= 64:
        return None
    slots = 2 if wide > 64 else 4
    one = replace(usual, consumers=1, block_n=64, kv_stages=slots, q_stages=2, consumer_registers=232)
    return replace(one, producer_registers=24, take_turns=False, ctas=2)


def pack(
    problem: Problem, usual: SM90Config, why: str, long: Problem | None = None, *, same_keys: bool = False
) -> tuple[Candidate, str]:
    """The best candidate, the usual configuration if none is much faster; and why. It must be no slower than the usual
    one on the problem `long`, either. With `same_keys` its key tiles are the usual ones."""
    first = _candidate(problem, usual, _usual_rate(usual))
    if first.waste(problem.seq_q) < 1 - GAIN:
        return first, why
    group = problem.heads_q // problem.heads_kv
    heads = [n for n in (1, 2, 4, 8, MOST_PACKED) if group % n == 0 and (n == 1 or _same_for_heads(problem))]
    others = [
        _candidate(problem, replace(config, packed=n), rate)
        for config, rate in ((usual, first.rate), *_narrow(problem, usual))
        if config.block_n == usual.block_n or not same_keys
        for n in heads
    ]
    if long is not None:
        least = _candidate(long, usual, first.rate).head_microseconds()
        others = [x for x in others if _candidate(long, x.config, x.rate).head_microseconds() <= least]
    best = min(others, key=Candidate.head_microseconds)
    if best.head_microseconds() > GAIN * first.head_microseconds():
        return first, why
    config = best.config
    what = "short key tiles" if config.block_n < usual.block_n else "tiles of fewer rows"
    if config.packed > 1:
        what = f"{config.packed} query heads of a key head in a tile"
    seen = _keys_of_row(best) / _keys_of_row(first)
    return best, f"{what}: its rows load and multiply {seen:.0%} of the keys that those of the usual tile do"


def _narrow(problem: Problem, usual: SM90Config) -> list[tuple[SM90Config, Rate]]:
    """Configurations with fewer rows, which last tiles fill better, and with shorter key tiles, for masks that leave a
    row few keys."""
    wide = usual.wide
    if usual.eight_bit is not None:
        return []
    if wide <= 64 and not is_masked(problem):
        two = replace(usual, consumers=2, kv_stages=4, consumer_registers=240, producer_registers=24)
        return [(two, Rate(8.1, 0.071, 0.03))]  # exponentials of two warpgroups leave the tensor core idle longer
    if wide > 128 or not is_masked(problem):
        return []
    if wide > 64:
        return [
            (replace(usual, block_n=64, kv_stages=4), Rate(9.0, 0.121, 0.02)),
            (replace(usual, block_n=32, kv_stages=6), Rate(9.0, 0.142, 0.02)),
        ]
    two = replace(usual, consumers=2, block_n=64, kv_stages=4, consumer_registers=240, producer_registers=24)
    four = replace(usual, consumers=4, block_n=32, kv_stages=8, consumer_registers=112, producer_registers=32)
    return [(two, Rate(7.5, 0.07, 0.03)), (replace(four, take_turns=False), Rate(6.0, 0.072, 0.015))]


def _usual_rate(config: SM90Config) -> Rate:
    """Of the configurations of `choose_config`."""
    wide = config.wide
    return Rate(7.5, 0.066, 0.03) if wide <= 64 else Rate(7.9, 0.109, 0.02) if wide <= 128 else Rate(9.0, 0.2, 0.02)


def _candidate(problem: Problem, config: SM90Config, rate: Rate) -> Candidate:
    """A configuration with its key tiles, all there are without a mask or where they depend on captured tensors."""
    masked, tokens, rows = is_masked(problem), config.tokens, config.block_m
    tiles = span_tiles(problem, tokens, config.block_n) if masked else None
    if tiles is None:
        shape = (max(1, -(-problem.seq_q // tokens)),)
        every = torch.full(shape, max(1, -(-problem.seq_k // config.block_n)))
        tiles = SpanTiles(every, torch.zeros_like(every))
    return Candidate(config, rate, tiles, rows)


def _same_for_heads(problem: Problem) -> bool:
    """Whether all heads of a group have one span and one scale."""
    return "h" not in problem.span_reads.symbols and problem.scales.q != "head"


def _keys_of_row(candidate: Candidate) -> float:
    """Keys of all tiles for each row of a head, filled or not."""
    config = candidate.config
    return candidate.tiles.total.sum().item() * config.block_n * config.block_m / config.packed


def split(problem: Problem, best: Candidate, target: Arch) -> tuple[int, str]:
    """Parts of the keys of a tile, and why: as many as end first, with the launch that combines them."""
    config = best.config
    heads = problem.batch * problem.heads_q // config.packed
    one = best.microseconds()
    tiles = heads * len(one)
    most = min(MOST_PARTS, int(best.tiles.total.max().item()) * config.block_n // LEAST_KEYS)
    if most < 2 or tiles > FEW * target.processors:
        return 1, ""
    fixed = config.block_m * best.rate.row / 1000
    rows = problem.batch * problem.seq_q * problem.heads_q
    times = {1: _makespan(one, heads, 1, target)}
    for parts in range(2, min(most, 1 + 4 * target.processors // tiles) + 1):
        combine = COMBINE_US + 8 * rows * parts * config.padded_v / COMBINE_BYTES
        part = fixed + PART_US + (one - fixed) / parts
        times[parts] = _makespan(part, heads, parts, target) + combine
    parts = min(times, key=times.__getitem__)
    if times[parts] > GAIN * times[1]:
        return 1, ""
    return parts, f"keys are shared out over {parts} CTAs a tile: {tiles} tiles on {target.processors} SMs"


def _makespan(tiles: Tensor, heads: int, parts: int, target: Arch) -> float:
    """When the last SM ends that takes tiles of `heads` heads, each `parts` times, the longest first."""
    ends = [0.0] * target.processors
    heapify(ends)
    for tile in sorted(tiles.tolist(), reverse=True):
        for _ in range(heads * parts):
            heapreplace(ends, ends[0] + tile)
    return max(ends)


@dataclass(frozen=True)
class TileOrder:
    """How the scheduler numbers output tiles: sections of heads, each section longest tile first."""

    m_tiles: int  # query tiles per head
    heads: int  # query heads over the whole batch
    section: int  # heads whose tiles the scheduler hands out together


def arrange(problem: Problem, target: Arch, config: SM90Config, why: str, parts: int = 1) -> Choice:
    """The choice of one configuration for a dense `problem`, with the keys of a tile in `parts` parts."""
    heads = problem.batch * problem.heads_q
    m_tiles = -(-problem.seq_q // config.tokens)
    section, section_why = _section(problem, target, m_tiles, config.packed)
    order = TileOrder(m_tiles, heads, section)
    tiles = heads // config.packed * m_tiles * parts
    grid = min(target.processors * config.ctas, tiles)
    moved = problem.batch * problem.seq_k * problem.heads_kv * config.dim_v
    packed = f" of {config.packed} heads" if config.packed > 1 else ""

    def lines() -> tuple[str, ...]:
        return (
            f"tile {config.block_m}{packed} x {config.block_n}, {config.consumers} consumer warpgroups, rings K "
            f"{config.kv_stages} V {config.kv_stages} Q {config.q_stages}, {config.smem_bytes} bytes of shared memory",
            f"{tiles} tiles ({m_tiles} a head), sections of {section} heads, {grid} CTAs",
            *([f"sm90.values_across before it: {moved:,} bytes of values, transposed"] if config.products else []),
        )

    cta_why = f"one persistent CTA on each of {target.processors} SMs takes tiles as it gets free"
    reasons = (why, section_why, cta_why, COPY_RULE)
    return Choice("prefill", config, (grid,), lines, reasons, partitions=parts, order=order)


def _section(problem: Problem, target: Arch, m_tiles: int, packed: int) -> tuple[int, str]:
    """How many query heads run side by side (all of some key heads')."""
    group = problem.heads_q // problem.heads_kv
    kv_heads = problem.batch * problem.heads_kv
    if not is_masked(problem):
        side_by_side = -(-target.processors // max(1, m_tiles * group // packed))
        why = f"tiles are equally long: {side_by_side} key heads at a time fill {target.processors} SMs"
        return min(kv_heads, side_by_side) * group, why
    element = ELEMENT_OF[problem.kv_dtype or problem.dtype]
    kv_bytes = element.bytes * max(problem.seq_k, 1) * (problem.dim_qk + problem.dim_v)
    sections = -(-kv_heads // max(1, target.l2_keep // kv_bytes))
    side_by_side = -(-kv_heads // sections)
    why = (
        f"tiles differ in length: {sections} even sections of {side_by_side} key heads, K and V within "
        f"{target.l2_keep >> 20} MiB of L2, each section longest tile first"
    )
    return side_by_side * group, why
