"""The Hopper decode kernel of a problem: its configuration and grid, and why."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from warpattn.errors import AttentionError
from warpattn.kernels.topology import Registers
from warpattn.language.nodes import Reads
from warpattn.problem import Problem, is_latent
from warpattn.problem.arch import Arch
from warpattn.problem.element import Element
from warpattn.problem.launch import DEFAULT_OPTIONS, EARLY, EARLY_AND_WAITS, Choice, PlanOptions
from warpattn.problem.scales import eight_bit_of

from ..operand_format import OperandFormat
from ..prefill.config import CONSUMER_ROWS, SMEM_LIMIT, pad_dim
from ..widths import MOST_VALUES
from .config import LEAST_BOX, REGISTERS, DecodeConfig, LengthSums, Overlap, Schedule, StreamConfig, SwapAB

MAX_TOKENS = 16
MANY_KEYS = 512  # with fewer dense keys the prefill kernel is faster
SM_SMEM = 233_472  # 228 KiB of an SM, of which every resident block takes 1 KiB for itself
SLACK = 520  # bytes the compiler adds: alignment of barriers, scratch of reductions (516 at 512 columns)
WHOLE_HEAD = 1 << 20  # key tiles of a part that holds all keys of a head
INVARIANT_KEYS = 2048  # keys of a part when results must not depend on the rest of the batch
IN_FLIGHT = 128 * 1024  # bytes of K and V in flight on an SM: with more, SMs finish further apart
DEEP_RING = 192 * 1024  # the same for a ring that fills before the preceding kernel ends
THROTTLED = 2  # slots of such a ring with copies in flight at a time
SHORT_ROW = 64  # columns
INTERLEAVED = 3  # heads of a CTA from which every n-th is faster than n in a row (bench/notes.md)
SWAP_AB_COLUMNS = (8, 16)  # of products with keys on the left; values must fill their 64 rows
EIGHT_BIT_COLUMNS = (8, 16, 32)
EIGHT_BIT_TILE = 16 * 1024  # bytes of K
TILE_BYTES = 32 * 1024  # of K: with less, a warpgroup meets its barriers too often
COMBINED = 24 * 1024  # numbers of a head's parts: of more, a second launch takes less time (bench/notes.md 232)
OVERHEAD = 1  # units of a head beside its keys where lengths may differ
LONG = 8 << 20  # bytes of keys and values of a CTA from which it is better alone on its SM to the end
SHORT = 1 << 20  # the same up to which many prefetches would delay the preceding kernel
PREFETCHED = (16 * 1024, 64 * 1024)  # bytes of keys that an SM prefetches: in short ranges, in others
PREFETCHED_DEEP = 48 * 1024  # beside a deep ring, in ranges of more than twice `SHORT`
EVERY_RANGE = 1 << 30  # units
WIDE_SUMS = 1024  # row tiles of a block where there are more than 128


class EvenCut(NamedTuple):
    """Equal parts of a head, and heads of a CTA; one of them is 1."""

    splits: int
    whole: int


def takes(problem: Problem) -> bool:
    """Whether the decode kernel can run a problem: few query tokens, dense or paged keys."""
    return problem.kind != "ragged" and 1 <= problem.seq_q <= MAX_TOKENS and problem.seq_k > 0


def check_takes(problem: Problem) -> None:
    """AttentionError for a problem that decode does not take."""
    if not takes(problem):
        rule = f"the decode kernel takes dense or paged keys and 1 to {MAX_TOKENS} query tokens"
        raise AttentionError(f"the problem is {problem.kind} with {problem.seq_q} query tokens; {rule}")


def serves(problem: Problem) -> bool:
    """Whether decode is the kernel of a problem that it takes: many dense keys, paged or 8-bit ones, or latent
    attention."""
    few_keys = problem.kind == "dense" and problem.seq_k < MANY_KEYS and problem.kv_dtype is None
    return takes(problem) and (not few_keys or is_latent(problem))


def choose(
    problem: Problem, target: Arch, *, ctas: int | None = None, options: PlanOptions = DEFAULT_OPTIONS
) -> Choice:
    """The choice for a problem that decode `takes`; `ctas` an SM, None: whichever is faster."""
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
    """The tiles and rings of a problem, before anything is known of its lengths; `ctas` as in `choose`."""
    rows = problem.seq_q * problem.heads_q // problem.heads_kv
    if problem.kv_dtype is not None:
        return eight_bit_tiles(problem, rows, ctas)
    return choose_tiles(problem.element, problem.dim_qk, problem.dim_v, problem.page_size, ctas, rows)


def finished(problem: Problem, target: Arch, config: DecodeConfig, grid: int) -> Choice:
    """The choice of tiles for `grid` CTAs, with the schedule, the combination and the overlap that follow from them."""
    config = replace(config, schedule=schedule_of(problem, config.schedule))
    config = arranged(config, problem, grid)
    config = replace(config, overlap=overlap_of(config, problem, grid))
    lines, reasons = partial(describe, config, problem, grid), explain(config, target, grid) + _own_reasons(config)
    return Choice("decode", config, (grid,), lines, reasons, partitions=partitions(problem, config, grid))


def choose_tiles(
    element: Element,
    dim_qk: int,
    dim_v: int,
    page_size: int = 0,
    ctas: int | None = None,
    rows: int = CONSUMER_ROWS,
) -> DecodeConfig:
    """The configuration for a pair of head dims, `page_size` keys a page (0: not paged), `ctas` blocks an SM, and for
    `rows` rows of queries a key head.

    Two blocks an SM where rows of keys are short, but paged or multiplied with 64 rows of queries: a tile of 64 columns
    arrives as fast as one warpgroup attends to it, so each CTA's softmax runs beside the other's (bench/notes.md).
    """
    wide = max(pad_dim(dim_qk), pad_dim(dim_v))
    box = page_size & -page_size
    rows = min(rows, tile_rows(dim_v))
    columns = next((size for size in SWAP_AB_COLUMNS if rows <= size), 0) if pad_dim(dim_v) >= CONSUMER_ROWS else 0
    gathers = 0 < box < LEAST_BOX
    if ctas is None:
        ctas = 2 if wide <= SHORT_ROW and not gathers and (box or not columns) else 1
    largest = max(TILE_BYTES // (element.bytes * wide), CONSUMER_ROWS) if columns else 128 if wide <= 128 else 64
    block_n = 64 if gathers or ctas > 1 else largest  # pointers of more rows exceed the producer's registers
    config = DecodeConfig(OperandFormat(element, dim_qk, dim_v), block_n, 2, box or None, ctas=ctas)
    if columns:
        config = replace(config, swap_ab=SwapAB(columns, next(n for n in (4, 8, 16) if rows <= n)))
    if gathers:
        config = replace(config, registers=replace(config.registers, producer=232))
    if ctas > 1:
        config = replace(config, registers=registers_of(config))
    return replace(config, stages=most_stages(config))


def eight_bit_tiles(problem: Problem, rows: int, ctas: int | None = None) -> DecodeConfig:
    """The configuration for 8-bit keys and values: always swap-AB, whose left operands may be registers. A thread holds
    its part of a tile's keys or values in 64 of them, with two blocks an SM in 32."""
    box = problem.page_size & -problem.page_size
    wide = max(pad_dim(problem.dim_qk), pad_dim(problem.dim_v), CONSUMER_ROWS)
    columns = next((size for size in EIGHT_BIT_COLUMNS if rows <= size), EIGHT_BIT_COLUMNS[-1])
    ctas = ctas or (2 if wide <= SHORT_ROW else 1)
    operands = OperandFormat(problem.element, problem.dim_qk, problem.dim_v, eight_bit_of(problem))
    swap_ab = SwapAB(columns, next((n for n in (4, 8, 16) if rows <= n), columns))
    config = DecodeConfig(operands, EIGHT_BIT_TILE // (ctas * wide), 2, box or None, ctas=ctas, swap_ab=swap_ab)
    return replace(config, registers=registers_of(config), stages=most_stages(config))


def registers_of(config: DecodeConfig) -> Registers:
    """Registers of the roles; two blocks of an SM share what one has."""
    producer = 40 if config.scale_bytes == 0 else 88  # with addresses of scales it spilled: 1.02 for 1.31 (H200)
    return REGISTERS if config.ctas == 1 else Registers((2 * config.max_registers - producer) // 8 * 8, producer)


def most_stages(config: DecodeConfig, in_flight: int = IN_FLIGHT) -> int:
    """Ring slots that fit beside the queries, for at most `in_flight` bytes on an SM, but two."""
    limit = min(SMEM_LIMIT, SM_SMEM // config.ctas - 1024) - SLACK - replace(config, stages=0).private_bytes
    fit = limit // (config.k_bytes + config.v_bytes + config.scale_bytes + 32)
    busy = in_flight // config.ctas // (config.k_bytes + config.v_bytes)
    return max(1, min(fit, max(2, busy)))


def even_cut(heads: int, ctas: int) -> EvenCut:
    """The cut that keeps `ctas` CTAs busy with `heads` heads of one length."""
    splits = max(1, ctas // max(heads, 1))
    return EvenCut(splits, -(-heads // ctas) if splits == 1 else 1)


def shorter_tiles(config: DecodeConfig) -> DecodeConfig:
    """The same with key tiles and bytes in flight halved, for heads that are split: a CTA's work after its last keys is
    the tail of the launch, and takes less time for half a tile. Whole heads are faster in longer tiles."""
    if config.eight_bit is not None:
        return replace(config, stages=most_stages(config, IN_FLIGHT // 2))
    if config.swap_ab is None or config.ctas > 1 or config.block_n < 128:
        return config
    return replace(config, block_n=config.block_n // 2, stages=2)


def fitting_tiles(config: DecodeConfig, problem: Problem, target: Arch) -> DecodeConfig:
    """The same with shorter tiles if heads are split, because there are fewer than CTAs, or are dense and not long."""
    grid = grid_size(config, target)
    whole = head_tiles(problem) >= grid
    short_ranges = problem.kind == "dense" and range_bytes(config, problem, grid) <= LONG
    return shorter_tiles(config) if short_ranges or not whole else config


def read_before_dependency(config: DecodeConfig) -> DecodeConfig:
    """The same for keys and values that are ready before the preceding kernel ends. With swap-AB: a deep ring of short
    tiles, so that CTAs that start early have tiles to read, and a throttle, so that they do not slow down CTAs that
    still run; then each may in turn trigger its dependents early. With 64 rows products take longer, and shorter tiles
    would not pay."""
    config = replace(config, overlap=Overlap(kv_ready_before_dependency=True))
    if config.swap_ab is None:
        return config
    config = shorter_tiles(config)
    stages = most_stages(config, DEEP_RING)
    throttle = THROTTLED if stages > THROTTLED else None
    overlap = replace(config.overlap, max_inflight_stages=throttle, trigger_fraction=4)
    return replace(config, stages=stages, overlap=overlap)


def invariant(config: StreamConfig) -> Schedule:
    """The schedule with results that do not depend on the rest of the batch."""
    return replace(config.schedule, invariant=True, unit=max(1, INVARIANT_KEYS // config.block_n))


def undivided(config: StreamConfig) -> Schedule:
    """The same, and results that do not depend on where a sequence is cut into steps either: units are counted from a
    step's last key, so a head's keys are one unit, of one CTA."""
    return replace(config.schedule, invariant=True, unit=WHOLE_HEAD)


def schedule_of(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule with the problem's lengths and row tiles."""
    tiles = row_tiles(problem)
    row_tiles_of_batch = problem.batch * tiles
    schedule = replace(schedule, has_lengths=problem.kind != "dense", one_row_tile=tiles == 1)
    schedule = replace(schedule, ragged=problem.ragged_queries, one_token=problem.ragged_queries and problem.seq_q == 1)
    if problem.kind == "dense" and tiles == 1 and _same_span(problem.span_reads):
        return replace(schedule, sums=None)
    narrow = LengthSums()
    if row_tiles_of_batch <= narrow.width:
        sums = replace(narrow, lane=narrow.width // 32)
    else:
        sums = LengthSums(WIDE_SUMS, once=row_tiles_of_batch <= WIDE_SUMS)
    return replace(schedule, sums=sums, head_overhead=0 if schedule.invariant else OVERHEAD)


def arranged(config: DecodeConfig, problem: Problem, grid: int) -> DecodeConfig:
    """The same with the combination of parts and the order of heads for `grid` CTAs."""
    heads, combine = head_tiles(problem), config.combine
    uniform = config.schedule.sums is None
    if config.swap_ab and uniform:
        combine = replace(combine, short_parts=short_parts(even_cut(heads, grid).splits, config))
    elif config.rows > SWAP_AB_COLUMNS[-1]:
        combine = replace(combine, short_parts=0)
    apart = head_rows(problem) > SWAP_AB_COLUMNS[-1] or combined(problem, config, grid) > COMBINED
    combine = replace(combine, separate_kernel=apart)
    interleave = uniform and not combine.separate_kernel and interleaves(heads, grid)
    return replace(config, combine=combine, schedule=replace(config.schedule, interleave_heads=interleave))


def short_parts(parts: int, config: DecodeConfig) -> int:
    """Most parts for the shorter code, if an even cut leaves `parts` of a head: a power of two, so that there are few
    different kernels, and no more than the registers hold."""
    if config.rows > SWAP_AB_COLUMNS[-1]:
        return 0  # one copy of the code for each block of rows would be long
    return min(1 << max(1, (parts - 1).bit_length()), 32, 4096 // config.padded_v)


def interleaves(heads: int, ctas: int) -> bool:
    """Whether each of `ctas` CTAs is faster with every n-th of `heads` heads of one length."""
    whole = even_cut(heads, ctas).whole
    return whole >= INTERLEAVED and heads % whole == 0


def overlap_of(config: DecodeConfig, problem: Problem, grid: int) -> Overlap:
    """The overlap of a launch with PDL. A CTA triggers its dependents early if its range is not long, which it decides
    itself; with throttled reads of pages always, because there it pays for long ranges, too (bench/notes.md)."""
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
    """CTAs of a launch. With one on an SM, a multiple of 16: with ranges on all SMs, those of the fullest clusters of
    SMs (GPCs) finish last (bench/notes.md has the times of three cards)."""
    return alone_on_sms(target) if config.ctas == 1 else target.processors * config.ctas


def alone_on_sms(target: Arch) -> int:
    """CTAs of a launch with one on an SM."""
    return target.processors // 16 * 16


def range_bytes(config: DecodeConfig, problem: Problem, grid: int) -> int:
    """Bytes of keys and values of each of `grid` CTAs if all sequences are as long as they may be."""
    tiles = head_tiles(problem) * problem.seq_k // (config.block_n * grid)
    return tiles * (config.k_bytes + config.v_bytes)


def tile_rows(dim_v: int) -> int:
    """Rows of a tile at most: 64, or, where an accumulator of 64 rows has too few columns, those of swap-AB."""
    return CONSUMER_ROWS if dim_v <= MOST_VALUES else SWAP_AB_COLUMNS[-1]


def row_tiles(problem: Problem) -> int:
    """Row tiles of a key head, also of latent attention; over 8-bit keys they have 32 rows."""
    rows = tile_rows(problem.dim_v) if problem.kv_dtype is None else EIGHT_BIT_COLUMNS[-1]
    rows = CONSUMER_ROWS if is_latent(problem) else rows
    return -(-problem.seq_q * problem.heads_q // problem.heads_kv // rows)


def head_rows(problem: Problem) -> int:
    """Rows of queries of a row tile."""
    return min(CONSUMER_ROWS, problem.seq_q * problem.heads_q // problem.heads_kv)


def head_tiles(problem: Problem) -> int:
    """Row tiles of all key heads of the batch: heads, if each has one."""
    return problem.batch * row_tiles(problem) * problem.heads_kv


def partitions(problem: Problem, config: StreamConfig, grid: int) -> int:
    """Parts of a head at most."""
    tiles = -(-max(problem.seq_k, 1) // config.block_n)
    return -(-tiles // config.schedule.unit) if config.schedule.invariant else min(grid, tiles)


def describe(config: DecodeConfig, problem: Problem, grid: int) -> tuple[str, ...]:
    """The configuration and the work as text; also of an `MlaConfig`."""
    return (
        f"{config.words}, {config.smem_bytes} bytes of shared memory",
        f"{problem.batch * problem.heads_kv} heads of {row_tiles(problem)} row tiles over {grid} CTAs",
    )


def explain(config: StreamConfig, target: Arch, grid: int) -> tuple[str, ...]:
    """Why the keys are partitioned as they are, for `grid` CTAs."""
    schedule = config.schedule
    if schedule.unit == WHOLE_HEAD:
        return ("batch invariant, however sequences are cut into steps: one CTA has all keys of a tile of rows",)
    unit = f"{schedule.unit} key tiles" if schedule.unit > 1 else "one key tile"
    where = f"{grid // target.processors} CTAs on each of {target.processors} SMs"
    if grid <= target.processors:
        few = ", so that no cluster of SMs is full" if grid == alone_on_sms(target) else ""
        where = f"{grid} of the {target.processors} SMs{few}"
    ranges = f"keys are partitioned to within {unit} over {where}"
    growth = f"if no range grows by more than {config.max_growth} units for it"
    even = f"equally long heads are not split, or into equal parts, {growth}"
    last = "the last CTA to finish a head combines its parts in a fixed order"
    last = "a second kernel combines the parts of a head" if config.combine.separate_kernel else last
    same = "every part has the same keys whatever else is in the batch"
    return (ranges, same if schedule.invariant else even, last)


def _own_reasons(config: DecodeConfig) -> tuple[str, ...]:
    """Why operands, heads and launches are arranged as they are."""
    reasons: tuple[str, ...] = ()
    if config.swap_ab:
        columns = config.swap_ab.columns
        reasons += (f"swap-AB: keys and values on the left of the products, {columns} columns for queries",)
    reasons += (_early_start(config.overlap),)
    if config.schedule.interleave_heads:
        reasons += ("a CTA takes every n-th head, so that CTAs read neighbouring heads at the same time",)
    return reasons


def _early_start(overlap: Overlap) -> str:
    """What PDL allows, with the reads of a CTA before it waits for the preceding kernel."""
    most = overlap.max_inflight_stages
    older = f"read older keys{'' if most is None else f', {most} tiles at a time'}"
    reads = [older] if overlap.kv_ready_before_dependency else []
    reads += [f"prefetch keys of {overlap.prefetch_tiles} tiles to L2"] if overlap.prefetch_tiles else []
    return f"{EARLY}, and {' and '.join(reads)} before they wait for its end" if reads else EARLY_AND_WAITS


def combined(problem: Problem, config: StreamConfig, grid: int) -> int:
    """Numbers of all parts of a head, about: as many parts as CTAs that a head keeps busy."""
    most = problem.seq_k if config.schedule.invariant else -(-grid // head_tiles(problem)) + 1
    parts = min(partitions(problem, config, grid), most)
    return parts * head_rows(problem) * config.padded_v


def _same_span(reads: Reads) -> bool:
    """Whether all sequences have the same span, which needs none of the caller's tensors."""
    return not reads.tensors and "b" not in reads.symbols
