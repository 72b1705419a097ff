"""Chooses configuration and grid of Hopper's decode kernel for a problem, with reasons."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from warpattn.errors import AttentionError, many
from warpattn.kernels.topology import Registers
from warpattn.language.nodes import Reads
from warpattn.problem import Problem, is_latent
from warpattn.problem.arch import Arch
from warpattn.problem.element import Element
from warpattn.problem.launch import DEFAULT_OPTIONS, EARLY, EARLY_AND_WAITS, MOST_DECODED, Choice, PlanOptions
from warpattn.problem.scales import eight_bit_of

from ..operand_format import OperandFormat
from ..prefill.config import CONSUMER_ROWS, MOST_VALUES, SMEM_LIMIT, pad_dim
from .config import LEAST_BOX, REGISTERS, DecodeConfig, LengthSums, Overlap, Schedule, StreamConfig, SwapAB

MANY_KEYS = 512  # with fewer dense keys the prefill kernel is faster
SM_SMEM = 233_472  # bytes: 228 KiB an SM, of which every resident CTA reserves 1 KiB
SLACK = 520  # bytes the compiler adds: alignment of barriers, scratch of reductions (516 at 512 columns)
WHOLE_HEAD = 1 << 20  # key tiles of a unit that holds all keys of a head
INVARIANT_KEYS = 2048  # keys of a part when results must not depend on the rest of the batch
IN_FLIGHT = 128 * 1024  # bytes of K and V in flight on an SM; with more, SMs finish further apart
DEEP_RING = 192 * 1024  # the same for a ring that fills before the preceding kernel ends
THROTTLED = 2  # slots of a deep ring with copies in flight at a time
SHORT_ROW = 64  # columns: up to this padded head dim two CTAs share an SM
INTERLEAVED = 3  # with so many heads a CTA, taking every n-th is faster than n in a row (bench/notes.md)
SWAP_AB_COLUMNS = (8, 16)  # query rows of a swap-AB product; the head dim of V must fill its 64 rows
EIGHT_BIT_COLUMNS = (8, 16, 32)
EIGHT_BIT_TILE = 16 * 1024  # bytes of an 8-bit K tile on an SM
TILE_BYTES = 32 * 1024  # bytes of a K tile with swap-AB; with less, a warpgroup meets its barriers too often
COMBINED = 24 * 1024  # if a head's partial outputs have more numbers, a combining kernel is faster (bench/notes.md 232)
OVERHEAD = 1  # units that a head counts beside its keys where lengths may differ
LONG = 8 << 20  # a CTA that reads so many bytes of K and V should not share its SM with the next launch's CTAs
SHORT = 1 << 20  # with so few, many prefetches would delay the preceding kernel
PREFETCHED = (16 * 1024, 64 * 1024)  # bytes of keys that an SM prefetches to L2: in short ranges, in longer ones
PREFETCHED_DEEP = 48 * 1024  # the same beside a deep ring, in ranges of more than twice `SHORT`
EVERY_RANGE = 1 << 30  # units: every range triggers early
IDLE = 16  # at most one of so many CTAs may have no work queue
WIDE_SUMS = 1024  # row tiles of a block (`LengthSums.width`) where there are more than 128


class EvenCut(NamedTuple):
    """An even partition: parts per head, and heads per CTA; one of them is 1."""

    splits: int
    whole: int


def takes(problem: Problem) -> bool:
    """Whether the decode kernel can run a problem: few query tokens, dense or paged keys."""
    return problem.kind != "ragged" and 1 <= problem.seq_q <= MOST_DECODED and problem.seq_k > 0


def check_takes(problem: Problem) -> None:
    """Raises AttentionError for a problem that decode does not take."""
    if not takes(problem):
        rule = f"the decode kernel takes dense or paged keys and 1 to {MOST_DECODED} query tokens"
        raise AttentionError(f"the problem is {problem.kind} with {many(problem.seq_q, 'query token')}; {rule}")


def serves(problem: Problem) -> bool:
    """Whether decode is chosen for a problem that it takes: if keys are many, paged or of 8 bits, or attention is
    latent."""
    few_keys = problem.kind == "dense" and problem.seq_k < MANY_KEYS and problem.kv_dtype is None
    return takes(problem) and (not few_keys or is_latent(problem))


def choose(
    problem: Problem, target: Arch, *, ctas: int | None = None, options: PlanOptions = DEFAULT_OPTIONS
) -> Choice:
    """The choice for a problem that decode `takes`. `ctas`: CTAs an SM; None: the faster."""
    check_takes(problem)
    config = tiles_of(problem, ctas)
    if options.kv_ready_before_dependency and not config.gathers:
        config = read_before_dependency(config)
    if options.batch_invariant:
        config = replace(config, schedule=invariant(config))
    elif not config.overlap.kv_ready_before_dependency:
        config = fitting_tiles(config, problem, target)
    return finished(problem, target, config, grid_size(config, target))


def tiles_of(problem: Problem, ctas: int | None = None) -> DecodeConfig:
    """Tiles and rings of a problem, whatever its lengths; `ctas` as in `choose`."""
    rows = problem.seq_q * problem.heads_q // problem.heads_kv
    if problem.kv_dtype is not None:
        return eight_bit_tiles(problem, rows, ctas)
    return choose_tiles(problem.element, problem.dim_qk, problem.dim_v, problem.page_size, ctas, rows)


def finished(problem: Problem, target: Arch, config: DecodeConfig, grid: int) -> Choice:
    """The `Choice` of `config` for `grid` CTAs, with the schedule, combination and overlap that follow from both."""
    config = replace(config, schedule=schedule_of(problem, config.schedule, grid))
    config = arranged(config, problem, grid)
    config = replace(config, overlap=overlap_of(config, problem, grid))
    lines, reasons = partial(describe, config, problem, grid), explain(config, target, grid, queues_of(problem, grid))
    reasons += _own_reasons(config)
    return Choice("decode", config, (grid,), lines, reasons, partitions=partitions(problem, config, grid))


def choose_tiles(
    element: Element,
    dim_qk: int,
    dim_v: int,
    page_size: int = 0,
    ctas: int | None = None,
    rows: int = CONSUMER_ROWS,
) -> DecodeConfig:
    """The configuration for a pair of head dims. `page_size`: keys of a page, 0 without pages; `ctas`: CTAs an SM;
    `rows`: query rows of a key head.

    Head dims up to 64 get two CTAs an SM if keys are paged or there is no swap-AB. A tile of 64 columns arrives as fast
    as one warpgroup can process it, so the softmax of one CTA should overlap that of another (bench/notes.md).
    """
    wide = max(pad_dim(dim_qk), pad_dim(dim_v))
    box = page_size & -page_size
    rows = min(rows, tile_rows(dim_v))
    columns = next((size for size in SWAP_AB_COLUMNS if rows <= size), 0) if pad_dim(dim_v) >= CONSUMER_ROWS else 0
    gathers = 0 < box < LEAST_BOX
    if ctas is None:
        ctas = 2 if wide <= SHORT_ROW and not gathers and (box or not columns) else 1
    largest = max(TILE_BYTES // (element.bytes * wide), CONSUMER_ROWS) if columns else 128 if wide <= 128 else 64
    block_n = 64 if gathers or ctas > 1 else largest  # gathers: pointers of more rows exceed the producer's registers
    config = DecodeConfig(OperandFormat(element, dim_qk, dim_v), block_n, 2, box or None, ctas=ctas)
    if columns:
        config = replace(config, swap_ab=SwapAB(columns, next(n for n in (4, 8, 16) if rows <= n)))
    if gathers:
        config = replace(config, registers=replace(config.registers, producer=232))
    if ctas > 1:
        config = replace(config, registers=registers_of(config))
    return replace(config, stages=most_stages(config))


def eight_bit_tiles(problem: Problem, rows: int, ctas: int | None = None) -> DecodeConfig:
    """The configuration for 8-bit K and V: always swap-AB, whose left operands may be in registers. A thread's part of
    a K or V tile takes 64 registers, or 32 with two CTAs an SM."""
    box = problem.page_size & -problem.page_size
    wide = max(pad_dim(problem.dim_qk), pad_dim(problem.dim_v), CONSUMER_ROWS)
    columns = next((size for size in EIGHT_BIT_COLUMNS if rows <= size), EIGHT_BIT_COLUMNS[-1])
    ctas = ctas or (2 if wide <= SHORT_ROW else 1)
    operands = OperandFormat(problem.element, problem.dim_qk, problem.dim_v, eight_bit_of(problem))
    swap_ab = SwapAB(columns, next((n for n in (4, 8, 16) if rows <= n), columns))
    config = DecodeConfig(operands, EIGHT_BIT_TILE // (ctas * wide), 2, box or None, ctas=ctas, swap_ab=swap_ab)
    return replace(config, registers=registers_of(config), stages=most_stages(config))


def registers_of(config: DecodeConfig) -> Registers:
    """Registers a thread of the roles; two CTAs of an SM share those of one."""
    producer = 40 if config.scale_bytes == 0 else 88  # addresses of scales spilled with 40: 1.31 x the time (H200)
    return REGISTERS if config.ctas == 1 else Registers((2 * config.max_registers - producer) // 8 * 8, producer)


def most_stages(config: DecodeConfig, in_flight: int = IN_FLIGHT) -> int:
    """Ring slots that fit in shared memory, at most `in_flight` bytes on an SM; at least two, if they fit."""
    limit = min(SMEM_LIMIT, SM_SMEM // config.ctas - 1024) - SLACK - replace(config, stages=0).private_bytes
    fit = limit // (config.k_bytes + config.v_bytes + config.scale_bytes + 32)
    busy = in_flight // config.ctas // (config.k_bytes + config.v_bytes)
    return max(1, min(fit, max(2, busy)))


def even_cut(heads: int, ctas: int) -> EvenCut:
    """The even partition that keeps `ctas` CTAs busy with `heads` heads of equal length."""
    splits = max(1, ctas // max(heads, 1))
    return EvenCut(splits, -(-heads // ctas) if splits == 1 else 1)


def queue_cut(problem: Problem, grid: int) -> EvenCut:
    """The even partition of a work queue over its CTAs, `grid` in all queues."""
    queues = queues_of(problem, grid)
    return even_cut(head_tiles(problem) // queues, grid // queues)


def shorter_tiles(config: DecodeConfig) -> DecodeConfig:
    """The config with half as long key tiles and half the bytes in flight, for split heads: the work after a CTA's last
    keys is the tail of the launch, and is shorter for half a tile. Whole heads are faster with long tiles."""
    if config.eight_bit is not None:
        return replace(config, stages=most_stages(config, IN_FLIGHT // 2))
    if config.swap_ab is None or config.ctas > 1 or config.block_n < 128:
        return config
    return replace(config, block_n=config.block_n // 2, stages=2)


def fitting_tiles(config: DecodeConfig, problem: Problem, target: Arch) -> DecodeConfig:
    """The config with shorter tiles if there are fewer heads than CTAs, or if keys are dense and not long."""
    grid = grid_size(config, target)
    whole = head_tiles(problem) >= grid
    short_ranges = problem.kind == "dense" and range_bytes(config, problem, grid) <= LONG
    return shorter_tiles(config) if short_ranges or not whole else config


def read_before_dependency(config: DecodeConfig) -> DecodeConfig:
    """The config for K and V that are ready before the preceding kernel ends. With swap-AB it gets a deep ring of short
    tiles, so that CTAs that start early have tiles to load, and a throttle, so that they do not slow down CTAs of the
    preceding kernel; so they can trigger the next launch early. With 64 rows, shorter tiles would not pay."""
    config = replace(config, overlap=Overlap(kv_ready_before_dependency=True))
    if config.swap_ab is None:
        return config
    config = shorter_tiles(config)
    stages = most_stages(config, DEEP_RING)
    throttle = THROTTLED if stages > THROTTLED else None
    overlap = replace(config.overlap, max_inflight_stages=throttle, trigger_fraction=4)
    return replace(config, stages=stages, overlap=overlap)


def invariant(config: StreamConfig) -> Schedule:
    """The schedule whose results do not depend on the rest of the batch."""
    return replace(config.schedule, invariant=True, unit=max(1, INVARIANT_KEYS // config.block_n))


def undivided(config: StreamConfig) -> Schedule:
    """The schedule whose results also do not depend on how a sequence is cut into steps. Units are counted from the
    last key of a step, so all keys of a head are one unit, in one CTA."""
    return replace(config.schedule, invariant=True, unit=WHOLE_HEAD)


def queues_of(problem: Problem, grid: int) -> int:
    """Work queues of a problem over `grid` CTAs, so that row tiles of a sequence, which read the same keys, are done at
    one time: one for each of its row tiles, or, where sequences differ in tokens, of a token's, if these are
    whole tiles; fewer, equal ones if more than one of `IDLE` CTAs would have none."""
    tiles = row_tiles(problem)
    if problem.ragged_queries and problem.seq_q > 1:
        tiles, rest = divmod(tiles, problem.seq_q)
        tiles = 1 if rest else tiles
    return next((n for n in range(min(tiles, grid), 1, -1) if tiles % n == 0 and grid % n * IDLE <= grid), 1)


def queue_row_tiles(problem: Problem, grid: int) -> int:
    """Row tiles of each work queue."""
    return problem.batch * row_tiles(problem) // queues_of(problem, grid)


def schedule_of(problem: Problem, schedule: Schedule, grid: int) -> Schedule:
    """The schedule with the problem's lengths and row tiles."""
    tiles, row_tiles_of_queue = row_tiles(problem), queue_row_tiles(problem, grid)
    schedule = replace(schedule, has_lengths=problem.kind != "dense", one_row_tile=tiles == 1)
    schedule = replace(schedule, ragged=problem.ragged_queries, one_token=problem.ragged_queries and problem.seq_q == 1)
    if problem.kind == "dense" and tiles == 1 and _same_span(problem.span_reads):
        return replace(schedule, sums=None)
    narrow = LengthSums()
    if row_tiles_of_queue <= narrow.width:
        sums = replace(narrow, lane=narrow.width // 32)
    else:
        sums = LengthSums(WIDE_SUMS, once=row_tiles_of_queue <= WIDE_SUMS)
    return replace(schedule, sums=sums, head_overhead=0 if schedule.invariant else OVERHEAD)


def arranged(config: DecodeConfig, problem: Problem, grid: int) -> DecodeConfig:
    """The config with the way to combine parts and the order of heads for `grid` CTAs."""
    heads, combine = head_tiles(problem), config.combine
    uniform = config.schedule.sums is None
    if config.swap_ab and uniform:
        cut = queue_cut(problem, grid)
        combine = replace(combine, short_parts=short_parts(cut.splits, config))
    elif config.rows > SWAP_AB_COLUMNS[-1]:
        combine = replace(combine, short_parts=0)
    apart = head_rows(problem) > SWAP_AB_COLUMNS[-1] or combined(problem, config, grid) > COMBINED
    combine = replace(combine, separate_kernel=apart)
    interleave = uniform and not combine.separate_kernel and interleaves(heads, grid)
    return replace(config, combine=combine, schedule=replace(config.schedule, interleave_heads=interleave))


def short_parts(parts: int, config: DecodeConfig) -> int:
    """`Combine.short_parts` for heads in `parts` equal parts: rounded up to a power of two, so that there are few
    different kernels, and no more than registers hold."""
    if config.rows > SWAP_AB_COLUMNS[-1]:
        return 0  # the code, repeated for each block of rows, would be long
    return min(1 << max(1, (parts - 1).bit_length()), 32, 4096 // config.padded_v)


def interleaves(heads: int, ctas: int) -> bool:
    """Whether CTAs are faster if each takes every n-th of `heads` equally long heads."""
    whole = even_cut(heads, ctas).whole
    return whole >= INTERLEAVED and heads % whole == 0


def overlap_of(config: DecodeConfig, problem: Problem, grid: int) -> Overlap:
    """How a launch overlaps its neighbours by PDL. A CTA triggers the next launch early if its range is not long, which
    it decides itself; with pages and a throttle always, since that pays for long ranges, too (bench/notes.md)."""
    overlap, tile = config.overlap, config.k_bytes + config.v_bytes
    own = range_bytes(config, problem, grid)
    throttled = overlap.max_inflight_stages is not None
    most = EVERY_RANGE if throttled and problem.kind != "dense" else LONG // (config.schedule.unit * tile)
    if overlap.kv_ready_before_dependency:
        prefetched = PREFETCHED_DEEP if own > 2 * SHORT and problem.kind == "dense" else 0
    else:
        prefetched = 0 if config.gathers or problem.span_reads.tensors else PREFETCHED[own > SHORT]
    tiles = min(prefetched // (config.ctas * config.k_bytes), 128 // config.boxes)
    return replace(overlap, pdl=True, trigger_max_units=most, prefetch_tiles=tiles)


def grid_size(config: DecodeConfig, target: Arch) -> int:
    """CTAs of a launch. With one CTA an SM, a multiple of 16 that leaves some SMs idle: if all had work, those of the
    GPCs with the most SMs would finish last (bench/notes.md has the times of three cards)."""
    return alone_on_sms(target) if config.ctas == 1 else target.processors * config.ctas


def alone_on_sms(target: Arch) -> int:
    """CTAs of a launch with one CTA an SM."""
    return target.processors // 16 * 16 or target.processors


def range_bytes(config: DecodeConfig, problem: Problem, grid: int) -> int:
    """Bytes of K and V that each of `grid` CTAs reads if all sequences have their maximum length."""
    tiles = head_tiles(problem) * problem.seq_k // (config.block_n * grid)
    return tiles * (config.k_bytes + config.v_bytes)


def tile_rows(dim_v: int) -> int:
    """Maximum rows of a tile: 64, or those of swap-AB where V is too wide for an accumulator of 64 rows."""
    return CONSUMER_ROWS if dim_v <= MOST_VALUES else SWAP_AB_COLUMNS[-1]


def row_tiles(problem: Problem) -> int:
    """Row tiles of a key head, also for latent attention; with 8-bit keys a tile has 32 rows."""
    rows = tile_rows(problem.dim_v) if problem.kv_dtype is None else EIGHT_BIT_COLUMNS[-1]
    rows = CONSUMER_ROWS if is_latent(problem) else rows
    return -(-problem.seq_q * problem.heads_q // problem.heads_kv // rows)


def head_rows(problem: Problem) -> int:
    """Query rows of a row tile."""
    return min(CONSUMER_ROWS, problem.seq_q * problem.heads_q // problem.heads_kv)


def head_tiles(problem: Problem) -> int:
    """Row tiles of all key heads of the batch."""
    return problem.batch * row_tiles(problem) * problem.heads_kv


def partitions(problem: Problem, config: StreamConfig, grid: int) -> int:
    """Maximum number of parts of a head."""
    tiles, schedule = -(-max(problem.seq_k, 1) // config.block_n), config.schedule
    return -(-tiles // schedule.unit) if schedule.invariant else min(grid // queues_of(problem, grid), tiles)


def describe(config: DecodeConfig, problem: Problem, grid: int) -> tuple[str, ...]:
    """The lines of a plan about configuration and work; also for an `MlaConfig`."""
    heads, tiles = many(problem.batch * problem.heads_kv, "head"), many(row_tiles(problem), "row tile")
    return f"{config.words}, {config.smem_bytes} bytes of shared memory", f"{heads} of {tiles} over {many(grid, 'CTA')}"


def explain(config: StreamConfig, target: Arch, grid: int, queues: int) -> tuple[str, ...]:
    """The reasons for the partition of keys over `grid` CTAs of `queues` work queues."""
    schedule = config.schedule
    if schedule.unit == WHOLE_HEAD:
        return ("batch invariant, however sequences are cut into steps: one CTA has all keys of a tile of rows",)
    unit = f"{schedule.unit} key tiles" if schedule.unit > 1 else "one key tile"
    where = f"{many(grid // target.processors, 'CTA')} on each of {target.processors} SMs"
    if grid <= target.processors:
        few = ", so that no cluster of SMs is full" if grid == alone_on_sms(target) else ""
        where = f"{grid} of the {target.processors} SMs{few}"
    ranges = f"keys are partitioned to within {unit} over {where}"
    growth = f"if no range grows by more than {many(config.max_growth, 'unit')} for it"
    even = f"equally long heads are not split, or into equal parts, {growth}"
    last = "the last CTA to finish a head combines its parts in a fixed order"
    last = "a second kernel combines the parts of a head" if config.combine.separate_kernel else last
    same = "every part has the same keys whatever else is in the batch"
    beside = f"{queues} CTAs read the same keys at a time, each for another row tile of the sequence"
    return (ranges, same if schedule.invariant else even, last, *([beside] if queues > 1 else []))


def _own_reasons(config: DecodeConfig) -> tuple[str, ...]:
    """The reasons for swap-AB, order of heads, combination and overlap."""
    reasons: tuple[str, ...] = ()
    if config.swap_ab:
        columns = config.swap_ab.columns
        reasons += (f"swap-AB: keys and values on the left of the products, {many(columns, 'column')} for queries",)
    reasons += (_early_start(config.overlap),)
    if config.schedule.interleave_heads:
        reasons += ("a CTA takes every n-th head, so that CTAs read neighbouring heads at the same time",)
    return reasons


def _early_start(overlap: Overlap) -> str:
    """Says what a CTA does under PDL before it waits for the preceding kernel."""
    most = overlap.max_inflight_stages
    older = "read older keys" if most is None else f"read older keys, {many(most, 'tile')} at a time"
    reads = [older] if overlap.kv_ready_before_dependency else []
    reads += [f"prefetch keys of {many(overlap.prefetch_tiles, 'tile')} to L2"] if overlap.prefetch_tiles else []
    return f"{EARLY}, and {' and '.join(reads)} before they wait for its end" if reads else EARLY_AND_WAITS


def combined(problem: Problem, config: StreamConfig, grid: int) -> int:
    """About how many numbers the partial outputs of a head have."""
    most = problem.seq_k if config.schedule.invariant else -(-grid // head_tiles(problem)) + 1
    parts = min(partitions(problem, config, grid), most)
    return parts * head_rows(problem) * config.padded_v


def _same_span(reads: Reads) -> bool:
    """Whether all sequences have the same span: it reads no captured tensors and not the batch index."""
    return not reads.tensors and "b" not in reads.symbols
