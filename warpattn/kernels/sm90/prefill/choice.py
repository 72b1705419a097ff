"""The choice of a dense prefill on Hopper: heads packed into a tile, keys split, short problems; grid and order.

The key tiles of each candidate are counted with the mask's own span and weighed by measured rates (rates.py); its
tiles are handed out to the SMs, and the one that ends first is chosen. Of ragged and paged batches the host knows no
lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heapreplace
from typing import NamedTuple, cast

from warpattn.kernels.pieces.span_tiles import SpanTiles, span_tiles
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.element import ELEMENT_OF
from warpattn.problem.launch import DEFAULT_OPTIONS, EARLY_AND_WAITS, Choice, PlanOptions
from warpattn.problem.operands import COPY_RULE, is_masked

from ..widths import block_columns, block_words
from .config import SM90Config
from .eight_bit.config import eight_bit_config, in_16_bits, over_copies, widens
from .rates import ALONE, LAUNCH_US
from .tilings import SHORT_ROWS, Tiling, choose_config, faster, tiling, tilings_of

PACKED = (1, 4, 8, 16, 2)  # query heads of a tile; of two that are as good the first one
GAIN = 0.95  # of the time of the usual configuration that another tile must be estimated to take at most
PACKED_GAIN = 0.97  # the same of the usual tile with several heads: key tiles are counted, no other rate is guessed
SPLIT_GAIN = 0.9  # the same of keys in parts
MANY_KEYS = 2048  # from which on the usual tile with all heads took 0.69 to 0.994 of its time with one (12 shapes)
SHORT_KEYS = 512  # up to which a section has a head an SM: 64 x 256 was 1.04 times as fast, 128 x 128 1.16 times (H200)
MANY = 8  # tiles an SM from which on their order matters little
LEAST_KEYS = 1024  # of a part
FEW = 2  # tiles an SM up to which keys may be split
MOST_PARTS = 64
PART_US = 1.0  # of a part: its first keys and its output in fp32
COMBINE_US, COMBINE_BYTES = 2.5, 3e6  # of the second launch: at least, and bytes a µs


class Candidate(NamedTuple):
    """A tiling, the key tiles of its row tiles, and what each takes in µs."""

    tiling: Tiling
    keys: int  # of all row tiles
    most_keys: int  # of one
    masked: float  # share of the key tiles
    times: list[float]  # of the row tiles of a head, or of the heads packed into it, the longest first

    @property
    def config(self) -> SM90Config:
        """Of the kernel."""
        return self.tiling.config

    @property
    def head_microseconds(self) -> float:
        """Time of all row tiles, for one head."""
        return round(sum(self.times) / self.tiling.packed, 6)  # sums in another order are the same

    def same_tile(self, other: Candidate) -> bool:
        """Whether only the heads in a tile differ."""
        return replace(self.config, packed=other.config.packed) == other.config

    def waste(self, problem: Problem, target: Arch | None) -> float:
        """At most this share of the work is for rows past the last query, in masked tiles, or of SMs without any."""
        share = 1 - problem.seq_q / (len(self.times) * self.tiling.rows) + self.masked
        if target is not None:
            heads = problem.batch * problem.heads_q
            whole = _makespan(self.times, heads, target)
            share += 1 - self.head_microseconds * heads / target.processors / whole
        return share


@lru_cache(1024)
def choose(problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS) -> Choice:
    """The choice for a dense `problem`. With `batch_invariant` nothing depends on the other sequences: its
    configuration has the least work, its parts are those of one sequence alone."""
    if problem.kv_dtype is not None and widens(problem, options):
        return over_copies(choose(in_16_bits(problem), target, options), problem)
    alone = replace(problem, batch=1) if options.batch_invariant else problem
    usual, why = usual_config(problem, problem.seq_q)
    best, why = pack(problem, usual, why, None if options.batch_invariant else target)
    parts, split_why = split(alone, best, target)
    if parts == 1:
        return arrange(problem, target, best.config, why)
    return arrange(problem, target, shared_out(best.config), f"{why}; {split_why}", parts)


def usual_config(problem: Problem, seq_q: int) -> tuple[SM90Config, str]:
    """`choose_config` for a problem whose sequences have about `seq_q` queries."""
    if problem.kv_dtype is not None:
        return eight_bit_config(problem, seq_q)
    *_, tensors = cast("tuple[tuple, tuple, tuple]", problem.mask)
    rows, columns = SHORT_ROWS if tensors else seq_q, block_columns(problem.dim_v)
    config, why = choose_config(ELEMENT_OF[problem.dtype], problem.dim_qk, columns, rows, is_masked(problem))
    wide = config.wide <= 64
    return config, "a mask that reads tensors: 240 registers a thread hold their elements" if tensors and wide else why


def shared_out(config: SM90Config) -> SM90Config:
    """The same with the keys of a tile in parts, whose fp32 columns go out in blocks that need no more memory."""
    columns = 1 << (sum(config.store_parts) // 2).bit_length() - 1
    return replace(config, split=True, store_parts=(min(columns, config.v_parts[-1]),))


def pack(
    problem: Problem, usual: SM90Config, why: str, target: Arch | None, long: Problem | None = None,
    *, same_keys: bool = False,
) -> tuple[Candidate, str]:  # fmt: skip
    """The candidate that ends first on the SMs of `target`, or without one has the least work; the usual configuration
    if none is better by enough; and why. Where lengths are on the device, it must have no more work than the usual one
    on the problem `long`, either. With `same_keys` its key tiles are the usual ones."""

    def work(candidate: Candidate) -> float:
        return candidate.head_microseconds if target is None else _microseconds(problem, candidate, target)

    def least_work(candidate: Candidate) -> float:
        return candidate.head_microseconds if target is None else _shared_evenly(problem, candidate, target)

    counts, at_length = KeyTiles(problem), None if long is None else _kept_tiles(long)
    first = counts.candidate(tiling(usual))
    if at_length is not None:
        first, why = _several_heads(first, why, counts, at_length)
    waste, few = first.waste(problem, target), PACKED_GAIN if long is None else GAIN
    other_tile = _counted(problem) and waste + faster(usual, long is not None) >= 1 - GAIN
    if waste < 1 - few and not other_tile:
        return first, why
    tilings = tilings_of(usual, packable(problem), other_tile, long is not None, same_keys)
    others = [counts.candidate(tiling) for tiling in tilings]
    if at_length is not None:
        least = at_length.candidate(tiling(usual)).head_microseconds
        others = [x for x in others if at_length.candidate(x.tiling).head_microseconds <= least]
    own = work(first)
    best, most = None, few * own
    for least, other in sorted(((least_work(x), x) for x in others), key=lambda one: one[0]):
        if least > most:
            break
        time, enough = work(other), min(most, (few if other.same_tile(first) else GAIN) * own)
        if time < enough or (best is None and time == enough):
            best, most = other, time
    return (first, why) if best is None else (best, _why(best, first))


def _several_heads(
    one: Candidate, why: str, counts: KeyTiles, at_length: KeyTiles
) -> tuple[Candidate, str]:
    """The usual tile with as many query heads as it may hold, where sequences have many keys and a mask, as those on
    record, if that is no more work here nor for long ones: its rows end closer to each other, and one kernel serves
    more lengths."""
    recorded = counts.masked and _counted(counts.problem) and one.config.eight_bit is None
    if not recorded or counts.problem.seq_k < MANY_KEYS:
        return one, why
    most = one.head_microseconds, at_length.candidate(one.tiling).head_microseconds
    for heads in sorted(packable(counts.problem), reverse=True):
        packed = tiling(replace(one.config, packed=heads))
        several = counts.candidate(packed)
        work = several.head_microseconds, at_length.candidate(packed).head_microseconds
        if heads > 1 and work[0] <= most[0] and work[1] <= most[1]:
            return several, _why(several, one)
    return one, why


def packable(problem: Problem) -> tuple[int, ...]:
    """How many heads a tile may hold."""
    group = problem.heads_q // problem.heads_kv
    return tuple(n for n in PACKED if group % n == 0 and (n == 1 or _same_for_heads(problem)))


def _why(best: Candidate, first: Candidate) -> str:
    """What a configuration has that the usual one has not."""
    config, usual = best.config, first.config
    what = "short key tiles" if config.block_n < usual.block_n else "tiles that the rows fill better"
    if config.block_m > usual.block_m:
        what = "tiles of more rows, which fewer waves of CTAs take"
    if usual.overlaps and not config.overlaps:
        what = "three warpgroups, each with one product at a time, hide exponentials better"
    if config.ctas > 1:
        what = "64-row tiles, two CTAs an SM, fit the rows or their keys better"
    if config.packed > 1:
        what = f"{config.packed} query heads of a key head in a tile"
    seen = _keys_of_row(best) / _keys_of_row(first)
    return f"{what}: its rows load and multiply {seen:.0%} of the keys that those of the usual tile do"


def _counted(problem: Problem) -> bool:
    """Whether the host can count key tiles, and the loop needs no registers for captured tensors or a score."""
    if not is_masked(problem):
        return problem.score is None
    reads = bool(cast("tuple[tuple, tuple, tuple]", problem.mask)[2])
    return not reads and problem.score is None and not problem.span_reads.symbols & {"b", "h"}


class KeyTiles:
    """The key tiles of a problem's row tiles, counted once for each size of both."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.masked = is_masked(problem)
        self.counted: dict[tuple[int, int], SpanTiles | None] = {}

    def candidate(self, tiling: Tiling) -> Candidate:
        """A tiling with its key tiles, all there are without a mask or where they depend on captured tensors."""
        problem, rate, rows, keys = self.problem, tiling.rate, tiling.rows, tiling.keys
        tiles = self._tiles(tiling.tokens, keys)
        if tiles is None:
            row_tiles, every = max(1, -(-problem.seq_q // tiling.tokens)), max(1, -(-problem.seq_k // keys)) * keys
            times = [rows * (rate.row + every * rate.key) / 1000] * row_tiles
            return Candidate(tiling, row_tiles * every, every, 0.0, times)
        total, masked = tiles.total.tolist(), tiles.masked.tolist()
        row, key, more = (rows * x / 1000 for x in (rate.row, keys * rate.key, keys * rate.masked))
        times = sorted((row + a * key + b * more for a, b in zip(total, masked)), reverse=True)
        return Candidate(tiling, sum(total) * keys, max(total) * keys, sum(masked) / sum(total), times)

    def _tiles(self, tokens: int, keys: int) -> SpanTiles | None:
        if self.masked and (tokens, keys) not in self.counted:
            self.counted[tokens, keys] = span_tiles(self.problem, tokens, keys)
        return self.counted.get((tokens, keys))


@lru_cache(64)
def _kept_tiles(problem: Problem) -> KeyTiles:
    """Those of a long problem, which many others are held against."""
    return KeyTiles(problem)


def _same_for_heads(problem: Problem) -> bool:
    """Whether all heads of a group have one span and one scale."""
    one_scale = problem.scales.q in (None, "tensor", "token")
    return one_scale and not (is_masked(problem) and "h" in problem.span_reads.symbols)


def _keys_of_row(candidate: Candidate) -> float:
    """Keys of all tiles for each row of a head, filled or not."""
    return candidate.keys * candidate.tiling.rows / candidate.tiling.packed


def _microseconds(problem: Problem, candidate: Candidate, target: Arch) -> float:
    """Time of a call, its keys in as many parts as end first."""
    whole = unsplit_microseconds(problem, candidate, target)
    return min([whole, *(LAUNCH_US + time for time in _split_times(problem, candidate, target).values())])


def unsplit_microseconds(problem: Problem, candidate: Candidate, target: Arch) -> float:
    """Time of a call whose keys are in one part."""
    heads = problem.batch * problem.heads_q // candidate.tiling.packed
    return LAUNCH_US + _makespan(candidate.times, heads, target) + (ALONE - 1) * candidate.times[0]


def _shared_evenly(problem: Problem, candidate: Candidate, target: Arch) -> float:
    """At least the time of a call: all of its work, equally much on every SM."""
    heads = problem.batch * problem.heads_q
    return LAUNCH_US + candidate.head_microseconds * heads / target.processors


def split(problem: Problem, best: Candidate, target: Arch) -> tuple[int, str]:
    """Parts of the keys of a tile, and why: as many as end first, with the launch that combines them."""
    heads = problem.batch * problem.heads_q // best.tiling.packed
    times = _split_times(problem, best, target)
    parts = min(times, key=times.__getitem__, default=1)
    if parts == 1 or times[parts] > SPLIT_GAIN * _makespan(best.times, heads, target):
        return 1, ""
    tiles = heads * len(best.times)
    return parts, f"keys are shared out over {parts} CTAs a tile: {tiles} tiles on {target.processors} SMs"


def _split_times(problem: Problem, best: Candidate, target: Arch) -> dict[int, float]:
    """Time of a call by the parts of its keys, from two on; nothing where tiles fill the SMs."""
    tiling, one = best.tiling, best.times
    config, heads = tiling.config, problem.batch * problem.heads_q // tiling.packed
    tiles = heads * len(one)
    short = config.ctas > 1 or (tiling.keys < 128 and config.wide <= 128)  # tiles for few keys
    most = min(MOST_PARTS, best.most_keys // LEAST_KEYS)
    if most < 2 or tiles > FEW * target.processors or short:
        return {}
    fixed = tiling.rows * tiling.rate.row / 1000
    rows = problem.batch * problem.seq_q * problem.heads_q
    times = {}
    for parts in range(2, min(most, 1 + 4 * target.processors // tiles) + 1):
        combine = COMBINE_US + 8 * rows * parts * config.padded_v / COMBINE_BYTES
        part = [fixed + PART_US + (time - fixed) / parts for time in one]
        times[parts] = _makespan(part, heads * parts, target) + combine
    return times


def _makespan(tiles: list[float], copies: int, target: Arch) -> float:
    """When the last SM ends that takes all `tiles`, the longest first, each `copies` times."""
    count, processors = len(tiles) * copies, target.processors
    if count <= processors:
        return tiles[0]
    if count > MANY * processors:
        return sum(tiles) * copies / processors + sum(tiles) / len(tiles) / 2
    if tiles[0] == tiles[-1]:
        return -(-count // processors) * tiles[0]
    ends = [0.0] * processors
    for tile in tiles:
        for _ in range(copies):
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
            f"tile {config.block_m}{packed} x {config.block_n}, {_many(config.consumers, 'consumer warpgroup')}, rings "
            f"K {config.kv_stages} V {config.v_stages} Q {config.q_stages}, {config.smem_bytes} bytes of shared memory",
            f"{_many(tiles, 'tile')} ({m_tiles} a head), sections of {_many(section, 'head')}, {_many(grid, 'CTA')}",
            *([f"sm90.transpose_values before it: {moved:,} bytes"] if config.products else []),
        )

    ctas = "one persistent CTA" if config.ctas == 1 else f"one of {config.ctas} persistent CTAs"
    cta_why = f"{ctas} on each of {target.processors} SMs takes tiles as it gets free"
    early = EARLY_AND_WAITS if config.split else f"{EARLY_AND_WAITS}; then those of the next kernel may"
    reasons = (why, tiling(config).row, *block_words(problem.dim_v), section_why, cta_why, early, COPY_RULE)
    return Choice("prefill", config, (grid,), lines, reasons, partitions=parts, order=order)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


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
    if problem.seq_k <= SHORT_KEYS:
        side_by_side = min(side_by_side, -(-target.processors // group))
        heads = _many(side_by_side, "key head")
        why = f"few keys: sections of {heads}, so that short tiles run while others load long ones"
        return side_by_side * group, why
    why = (
        f"tiles differ in length: {_many(sections, 'even section')} of {_many(side_by_side, 'key head')}, K and V "
        f"within {target.l2_keep >> 20} MiB of L2, each section longest tile first"
    )
    return side_by_side * group, why
