"""Chooses tile, packed heads and number of split-KV parts of a dense prefill on Hopper.

For each candidate the planner counts key tiles with the mask's span, estimates their time from measured rates
(rates.py), and schedules the tiles on the SMs; the candidate that ends first wins. Ragged and paged batches, whose
lengths the host does not know, use the same rates (prefill_varlen/config.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heapreplace
from typing import NamedTuple

from warpattn.errors import many
from warpattn.kernels.pieces.span_tiles import SpanTiles, TileSize, span_tiles
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.element import ELEMENT_OF
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, PlanOptions
from warpattn.problem.operands import is_masked

from ..copies.config import copies, of_copies, over_copies, with_scales
from .config import CONSUMER_ROWS, SHORT_ROWS, SM90Config, TileShape, choose_config, with_tile
from .eight_bit.config import eight_bit_config
from .launch import arrange
from .rates import BYTES_US, COMMAND, FILL_US, LAUNCH_US, RATES, RECORDED, TOGETHER, Rate

PACKED = (1, 4, 8, 16, 2, 7, 6, 5, 3)  # query heads in a tile, in order of preference between equally good ones
UNFILLED = 1.05  # time of tiles whose heads do not fill their rows, over the estimate (bench/notes.md 273)
GAIN = 0.978  # another tile or number of heads is taken only if its time is at most this share of the usual one's
SPLIT_GAIN = 0.9  # the same for split keys
MANY = 8  # with more tiles an SM the order of unequal ones matters little
LEAST_KEYS = 1024  # of a split-KV part
FEW = 2  # keys are split only with at most so many tiles an SM
MOST_PARTS = 64
PART_US = 1.0  # µs that a part adds: loading its first keys, writing its fp32 output
COMBINE_US, COMBINE_BYTES = 2.5, 3e6  # the combining launch: its least µs, and its bytes per µs


class MeasuredRow(NamedTuple):
    """A row of the rates: the widest head dim, a tile, and its rate."""

    columns: int
    tile: TileShape
    rate: Rate


class Tiling(NamedTuple):
    """What the estimate needs of a configuration: its tile, and the tile's rate. The planner weighs many tilings and
    makes an `SM90Config` only of the best."""

    shape: TileShape
    rate: Rate
    packed: int  # query heads in a tile
    rows: int  # rows of a tile
    tokens: int  # of a tile
    wide: int  # the wider head dim, as it is in memory
    columns: int  # of the output, as kernels pad it

    def with_tile(self, shape: TileShape) -> Tiling:
        """Another tile for the same head dims, with one head in it."""
        rows, rate = CONSUMER_ROWS * shape.consumers, measured_row(self.wide, shape).rate
        return Tiling(shape, rate, 1, rows, rows, self.wide, self.columns)

    def with_heads(self, packed: int) -> Tiling:
        """The same tile with so many heads in it."""
        return self._replace(packed=packed, tokens=self.shape.consumers * (CONSUMER_ROWS // packed))

    @property
    def start_microseconds(self) -> float:
        """What a launch takes beside its tiles."""
        return LAUNCH_US + (FILL_US if self.shape.consumers > 1 else 0.0)


class Candidate(NamedTuple):
    """A tiling, its keys, and the estimated time of each row tile."""

    tiling: Tiling
    keys: int  # keys of all row tiles of a head, in whole key tiles
    most_keys: int  # keys of the longest row tile
    times: list[float]  # µs of each row tile of a head (or group of packed heads), the longest first

    @property
    def head_microseconds(self) -> float:
        """Time of all row tiles, for one head, in µs."""
        return round(sum(self.times) / self.tiling.packed, 6)  # rounded, so that the order of the sum does not matter


class Best(NamedTuple):
    """The chosen candidate, its configuration, and the reason."""

    candidate: Candidate
    config: SM90Config
    why: str


@lru_cache(1024)
def choose(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """Chooses the configuration of a dense `problem`. With `batch_invariant` the choice may not depend on the batch: it
    takes the configuration with the least work, and splits keys as for one sequence alone."""
    if problem.kv_dtype is not None and copies(problem, options):
        choice = choose(of_copies(problem), target, options)
        operands = with_scales(choice.config.operands, problem)
        return over_copies(choice, replace(choice.config, operands=operands), problem)
    alone = replace(problem, batch=1) if options.batch_invariant else problem
    usual, why = usual_config(problem, problem.seq_q)
    best = best_tile(problem, usual, why, None if options.batch_invariant else target)
    parts, split_why = split(alone, best.candidate, target)
    row = row_words(best.candidate.tiling)
    if parts == 1:
        return arrange(problem, target, best.config, (best.why, row), ctas=best_ctas(problem, best.candidate, target))
    return arrange(problem, target, shared_out(best.config), (f"{best.why}; {split_why}", row), parts)


def usual_config(problem: Problem, seq_q: int) -> tuple[SM90Config, str]:
    """`choose_config` for a problem whose sequences have about `seq_q` queries."""
    if problem.kv_dtype is not None:
        return eight_bit_config(problem, seq_q)
    tensors, masked = problem.mask.tensors, is_masked(problem)
    rows = SHORT_ROWS if tensors else seq_q
    config, why = choose_config(ELEMENT_OF[problem.dtype], problem.dim_qk, problem.dim_v, rows, masked)
    if tensors and config.wide <= 64:
        why = "a mask that reads tensors: 240 registers a thread hold their elements"
    return config, why


def shared_out(config: SM90Config) -> SM90Config:
    """`config` with split keys. Its fp32 output is stored in narrower column blocks, which fit the same memory."""
    columns = 1 << (sum(config.store_parts) // 2).bit_length() - 1
    parts = replace(config, split=True, operands=replace(config.operands, exact_values=False))
    return replace(parts, store_parts=(min(columns, parts.v_parts[-1]),))


def best_tile(problem: Problem, usual: SM90Config, why: str, target: Arch | None) -> Best:
    """The candidate that ends first on the SMs of `target`, or, with `target` None, has the least work. The usual
    configuration if none is better by enough."""
    counts = KeyTiles(problem)
    first = Best(counts.candidate(tiling(usual)), usual, why)
    tilings = tilings_beside(counts, first, tiles_of(first.candidate.tiling.wide))
    return best_of(problem, target, first, counts.candidates(tilings))


def tilings_beside(counts: KeyTiles, first: Best, tiles: Collection[TileShape]) -> list[Tiling]:
    """Tilings that may be better than `first`: its own tile and other `tiles`, each with every number of heads."""
    own = first.candidate.tiling.with_heads(1)
    others = tiles if counts.all_known and first.config.eight_bit is None else ()
    alone = [own, *(own.with_tile(shape) for shape in others if shape != own.shape)]
    heads = packable(counts.problem)
    return [one.with_heads(n) for one in alone for n in heads]


def best_of(
    problem: Problem, target: Arch | None, first: Best, others: list[Candidate], gain: float = GAIN, slots: int = 2
) -> Best:
    """The candidate of `others` that ends first, if its rings fit in shared memory (`slots`: see `with_tile`) and it
    takes at most `gain` times as long as `first`; else `first`."""

    def time(candidate: Candidate) -> tuple[float, float]:
        work = candidate.head_microseconds  # decides between equal times
        return (work if target is None else _microseconds(problem, candidate, target)), work

    most, usual = gain * time(first.candidate)[0], first.candidate.tiling.shape
    for (microseconds, _), best in sorted(((time(other), other) for other in others), key=lambda one: one[0]):
        if microseconds > most:
            break
        shape = best.tiling.shape
        config = first.config if shape == usual else with_tile(first.config, shape, slots)
        if config is not None:
            return better(best, replace(config, packed=best.tiling.packed), first)
    return first


def packable(problem: Problem) -> tuple[int, ...]:
    """Numbers of query heads that a tile may hold."""
    group = problem.heads_q // problem.heads_kv
    found = [n for n in PACKED if group % n == 0 and (problem.kv_dtype is None or CONSUMER_ROWS % n == 0)]
    return tuple(found) if len(found) == 1 or _same_for_heads(problem) else (1,)


def better(best: Candidate, config: SM90Config, first: Best) -> Best:
    """A `Best` whose reason says how the configuration differs from the usual one."""
    usual = first.config
    what = "short key tiles" if config.block_n < usual.block_n else "tiles that the rows fill better"
    if config.block_m > usual.block_m:
        what = "tiles of more rows, which fewer waves of CTAs take"
    if usual.overlaps and not config.overlaps:
        what = "three warpgroups, each with one product at a time, hide exponentials better"
    if config.ctas > 1:
        what = "64-row tiles, two of which fit on an SM, waste fewer rows or keys"
    if config.packed > 1:
        what = f"{config.packed} query heads of a key head in a tile"
    seen = _keys_of_row(best) / _keys_of_row(first.candidate)
    why = f"{what}: its rows load and multiply {seen:.0%} of the keys that those of the usual tile do"
    return Best(best, config, why)


def tiles_of(wide: int) -> tuple[TileShape, ...]:
    """Measured tiles for head dims of at most `wide` columns."""
    return tuple(RATES[columns_of(wide)]) if wide <= max(RATES) else ()


def columns_of(wide: int) -> int:
    """The key of `RATES` for head dims of `wide` columns: the next larger one, or the largest."""
    return min((size for size in RATES if size >= wide), default=max(RATES))


def measured_row(wide: int, tile: TileShape) -> MeasuredRow:
    """The row of rates for a tile: its own, or that of the nearest tile that was measured."""
    columns = columns_of(wide)
    rates = RATES[columns]
    known = tile if tile in rates else min(rates, key=lambda known: sum(abs(a - b) for a, b in zip(known, tile)))
    return MeasuredRow(columns, known, rates[known])


def row_words(tiling: Tiling) -> str:
    """A tiling's row of rates in words, for a plan's reasons."""
    columns, known, rate = measured_row(tiling.wide, tiling.shape)
    alone = f", {known.ctas} on an SM" if known.ctas > 1 else ""
    near = "" if known == tiling.shape and tiling.wide <= columns else ", the nearest one"
    return (
        f"weighed by the row {64 * known.consumers} x {known.keys}{alone} to {columns} columns{near}: "
        f"{rate.row:g} ns a row, {rate.key:g} a key of it, {rate.masked:g} more in masked tiles; `{COMMAND}`, "
        + RECORDED.format("*-choices*")
    )


def tiling(config: SM90Config) -> Tiling:
    """The `Tiling` of a configuration."""
    shape, rows, tokens, columns = config.tile_shape, config.block_m, config.tokens, config.columns_v
    wide = max(config.operands.dim_qk, min(config.operands.dim_v, columns))
    return Tiling(shape, measured_row(wide, shape).rate, config.packed, rows, tokens, wide, columns)


class KeyTiles:
    """Counts the key tiles of a problem's row tiles, once for each pair of tile sizes."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.masked = is_masked(problem)
        self.counted: dict[TileSize, SpanTiles] = {}

    @property
    def all_known(self) -> bool:
        """Whether the host can count key tiles, and the key loop needs no registers for captured tensors or scores."""
        problem = self.problem
        if problem.score is not None or not self.masked:
            return problem.score is None
        return not problem.mask.tensors and not problem.span_reads.symbols & {"b", "h"}

    def candidates(self, tilings: Sequence[Tiling]) -> list[Candidate]:
        """Candidates of `tilings`; with all key tiles where there is no mask or its span reads captured tensors."""
        if self.masked:
            sizes = {TileSize(tiling.tokens, tiling.shape.keys) for tiling in tilings}
            self.counted |= span_tiles(self.problem, sizes - self.counted.keys())
        return [self._candidate(tiling) for tiling in tilings]

    def candidate(self, tiling: Tiling) -> Candidate:
        """The candidate of one tiling."""
        (candidate,) = self.candidates([tiling])
        return candidate

    def _candidate(self, tiling: Tiling) -> Candidate:
        problem, rate, rows, keys = self.problem, tiling.rate, tiling.rows, tiling.shape.keys
        slower = UNFILLED if CONSUMER_ROWS % tiling.packed else 1.0
        tiles = self.counted.get(TileSize(tiling.tokens, keys))
        if tiles is None:
            row_tiles, every = max(1, -(-problem.seq_q // tiling.tokens)), max(1, -(-problem.seq_k // keys)) * keys
            times = [slower * rows * (rate.row + every * rate.key) / 1000] * row_tiles
            return Candidate(tiling, row_tiles * every, every, times)
        total, masked = tiles
        row, key, more = (slower * rows * x / 1000 for x in (rate.row, keys * rate.key, keys * rate.masked))
        times = sorted((row + a * key + b * more for a, b in zip(total, masked)), reverse=True)
        return Candidate(tiling, sum(total) * keys, max(total) * keys, times)


def _same_for_heads(problem: Problem) -> bool:
    """Whether all query heads of a group have the same span and scale."""
    one_scale = problem.scales.q in (None, "tensor", "token")
    return one_scale and not (is_masked(problem) and "h" in problem.span_reads.symbols)


def _keys_of_row(candidate: Candidate) -> float:
    """Row-key pairs that the tiles of one head compute."""
    return candidate.keys * candidate.tiling.rows / candidate.tiling.packed


def _microseconds(problem: Problem, candidate: Candidate, target: Arch) -> float:
    """Time of a call in µs, with the best number of parts."""
    whole = unsplit_microseconds(problem, candidate, target)
    parts = _split_times(problem, candidate, target).values()
    return min([whole, *(candidate.tiling.start_microseconds + time for time in parts)])


def unsplit_microseconds(problem: Problem, candidate: Candidate, target: Arch) -> float:
    """Time of a call in µs without split keys: of the SMs, and of memory, which brings queries and keys and takes the
    output. The longer of them counts most: each waits for the other now and then."""
    ctas, heads = best_ctas(problem, candidate, target), _tile_heads(problem, candidate)
    keys = min(problem.seq_k, candidate.keys)
    rows = problem.seq_q * problem.heads_q + keys * problem.heads_kv
    memory = problem.batch * rows * (problem.dim_qk + problem.dim_v) * ELEMENT_OF[problem.dtype].bytes / BYTES_US
    both = (_makespan(candidate.times, heads, target, ctas) ** 3 + memory**3) ** (1 / 3)
    return candidate.tiling.start_microseconds + both


def best_ctas(problem: Problem, candidate: Candidate, target: Arch) -> int:
    """CTAs that an SM runs at once: all that fit; but one, if they take at most a tile each and one ends sooner. Among
    unequal tiles the longest would share SMs; one CTA takes a short tile after a long one (bench/notes.md 269)."""
    heads, most = _tile_heads(problem, candidate), candidate.tiling.shape.ctas
    if heads * len(candidate.times) > most * target.processors:
        return most
    return min(range(1, most + 1), key=lambda ctas: _makespan(candidate.times, heads, target, ctas))


def _tile_heads(problem: Problem, candidate: Candidate) -> int:
    """Heads of a row of tiles: groups of packed ones count once."""
    return problem.batch * problem.heads_q // candidate.tiling.packed


def split(problem: Problem, best: Candidate, target: Arch) -> tuple[int, str]:
    """(parts, reason): the number of split-KV parts that ends first, the combining launch included."""
    heads, times = _tile_heads(problem, best), _split_times(problem, best, target)
    parts = min(times, key=times.__getitem__, default=1)
    if parts == 1 or times[parts] > SPLIT_GAIN * _makespan(best.times, heads, target):
        return 1, ""
    tiles = many(heads * len(best.times), "tile")
    return parts, f"keys are shared out over {parts} CTAs a tile: {tiles} on {target.processors} SMs"


def _split_times(problem: Problem, best: Candidate, target: Arch) -> dict[int, float]:
    """Time of a call in µs by number of parts, from two on; {} where tiles fill the SMs."""
    tiling, one, heads = best.tiling, best.times, _tile_heads(problem, best)
    tiles = heads * len(one)
    short = tiling.shape.ctas > 1 or (tiling.shape.keys < 128 and tiling.wide <= 128)  # tiles meant for few keys
    most = min(MOST_PARTS, best.most_keys // LEAST_KEYS)
    if most < 2 or tiles > FEW * target.processors or short:
        return {}
    fixed = tiling.rows * tiling.rate.row / 1000
    rows = problem.batch * problem.seq_q * problem.heads_q
    times = {}
    for parts in range(2, min(most, 1 + 4 * target.processors // tiles) + 1):
        combine = COMBINE_US + 8 * rows * parts * tiling.columns / COMBINE_BYTES
        part = [fixed + PART_US + (time - fixed) / parts for time in one]
        times[parts] = _makespan(part, heads * parts, target) + combine
    return times


def _makespan(tiles: list[float], copies: int, target: Arch, ctas: int = 1) -> float:
    """When the last SM ends if `ctas` CTAs on each take all `tiles` (µs, alone), the longest first, `copies` times."""
    count, slots, slower = len(tiles) * copies, target.processors * ctas, ctas / TOGETHER if ctas > 1 else 1.0
    if count <= slots:
        return slower * tiles[0]
    if tiles[0] == tiles[-1]:
        return slower * -(-count // slots) * tiles[0]
    if count > MANY * slots:
        return slower * (sum(tiles) * copies / slots + sum(tiles) / len(tiles) / 2)
    ends = [0.0] * slots
    for tile in tiles:
        for _ in range(copies):
            heapreplace(ends, ends[0] + tile)
    return slower * max(ends)
