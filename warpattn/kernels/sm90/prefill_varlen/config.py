"""VarlenConfig: compile-time parameters of the Hopper prefill of ragged batches and paged caches, and their choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from warpattn.errors import many
from warpattn.kernels.pieces.scheduler_sizes import SPLIT_VARLEN_FIELDS, VARLEN_TILE_FIELDS
from warpattn.kernels.topology import Topology
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.launch import DEFAULT_OPTIONS, EARLY_AND_WAITS, Choice, PlanOptions
from warpattn.problem.operands import COPY_RULE

from ..copies.config import (
    copies,
    least_queries,
    of_copies,
    over_copies,
    over_workspace,
    with_scales,
)
from ..prefill.choice import (
    Best,
    KeyTiles,
    best_of,
    better,
    packable,
    row_words,
    shared_out,
    split,
    tiling,
    tilings_beside,
    usual_config,
)
from ..prefill.config import SHORT_ROWS, SM90Config, TileShape, value_words
from ..prefill.rates import LENGTHS_TILES

PAGED_REGISTERS = 32  # registers a thread of a producer that holds page numbers, beside 2 x 240 or 3 x 160
COPIED_KEYS = 64  # most keys of a tile that is copied row by row: half the code of 128
LEAST_BOX = 8  # rows after which the swizzle repeats: the least rows of a TMA box
SLOTS = 4  # slots of a ring that `with_tile` tries first, because keys may arrive page by page
GAIN = 0.95  # another tile is taken only for so much: lengths change, and every kernel takes seconds to compile
LONG = 8192  # a configuration must also be no slower than the usual one for so many queries and keys


class OrderTiles(NamedTuple):
    """Compile-time parameters of the kernel that lists query blocks."""

    ragged_q: bool
    ragged_k: bool
    block_m: int  # tokens of a query block
    block_n: int  # keys of a key tile


@dataclass(frozen=True)
class VarlenConfig:
    """The tiles of the dense kernel, and how key rows reach shared memory."""

    tiles: SM90Config
    page_size: int  # 0: keys of all sequences are packed end to end
    ragged_queries: bool  # queries are packed end to end; else every sequence has the same number
    box: int  # rows of a TMA box of keys; 0: ordinary copies, row by row
    copied: bool = False  # reads 16-bit copies of K and V that a preceding launch makes (sm90/copies)
    same_bits: bool = False  # a row has the same bits wherever it is in a tile, so its references move by one rule

    @cached_property
    def topology(self) -> Topology:
        """Roles and rings of a CTA; its published tiles also hold the lengths of their sequence."""
        return self.tiles.topology_with(SPLIT_VARLEN_FIELDS if self.tiles.split else VARLEN_TILE_FIELDS)

    @property
    def order_tiles(self) -> OrderTiles:
        """The parameters of the kernel that lists query blocks."""
        return OrderTiles(self.ragged_queries, self.page_size == 0, self.tiles.tokens, self.tiles.block_n)


class VarlenShape(NamedTuple):
    """The attention kernel's `shape` argument, int32; see `VarlenScheduler`, `ClippedColumns` and `Table`."""

    heads_q: Any
    group: Any
    section: Any
    lse_batch: Any
    lse_head: Any
    q_step: Any
    q_unit: Any
    o_step: Any
    o_unit: Any
    table_stride: Any
    pages: Any
    starts: Any  # see `SplitVarlenScheduler`
    row_unit: Any
    splits: Any


@dataclass(frozen=True)
class VarlenOrder:
    """How the scheduler numbers output tiles: section by section, within each the longest of all sequences first."""

    blocks: int  # upper bound of the number of query blocks
    candidates: int  # places where a query block may begin, see nvidia/order_kernel.py
    section: int  # query heads whose tiles the scheduler hands out together


def choose_over_places(problem: Problem, target: Arch, size: int) -> Choice:
    """Chooses the configuration for those sequences of a step whose keys are copied into a workspace of `size` bytes.
    They are long, so work is counted for as many as the step may have of the shortest."""
    sequences = min(problem.batch, max(1, problem.seq_q // least_queries(problem)))
    choice = choose(of_copies(problem), target, PlanOptions(copies=False), sequences)
    tiles = replace(choice.config.tiles, operands=with_scales(choice.config.tiles.operands, problem))
    return over_workspace(choice, replace(choice.config, tiles=tiles), problem, size)


def choose(
    problem: Problem, target: Arch, options: PlanOptions = DEFAULT_OPTIONS, sequences: int = 0
) -> Choice:
    """Chooses the configuration of a ragged or paged `problem`. The host knows only upper bounds of the lengths, so it
    counts work for a sequence of mean length. With `batch_invariant` the other sequences, and the other rows of its
    own, must change no bit of a row's result: so there is one tile, and only the heads in it may differ. `sequences`:
    how many ragged ones share all queries; 0: all of them."""
    if (problem.page_size or problem.kv_dtype is not None) and copies(problem, options):
        choice = choose(of_copies(problem), target, options)
        tiles = choice.config.tiles
        tiles = replace(tiles, operands=with_scales(tiles.operands, problem))
        return over_copies(choice, replace(choice.config, tiles=tiles, copied=True), problem)
    usual = _typical(problem, options, sequences)
    in_any_step = options.batch_invariant and problem.ragged_queries
    tiles, why = usual_config(problem, SHORT_ROWS if in_any_step else problem.max_q or usual.seq_q)
    box, box_why = _box(problem.page_size, tiles.block_n)
    if problem.page_size and problem.kv_dtype is None:
        keys = tiles.block_n if box else min(tiles.block_n, COPIED_KEYS)
        tiles = replace(tiles, registers=replace(tiles.registers, producer=PAGED_REGISTERS), block_n=keys)
    near = replace(usual, batch=1, seq_q=_near(usual.seq_q), seq_k=_near(usual.seq_k), max_q=0)
    best = _best_tile(near, tiles, why, options.batch_invariant)
    parts, split_why = 1, ""
    if not in_any_step:
        parts, split_why = split(usual, best.candidate, target)
    tiles = best.config if parts == 1 else shared_out(best.config)
    box = min(box, tiles.block_n)
    one_rule = options.batch_invariant and (problem.has_lse or parts > 1 or tiles.products)
    config = VarlenConfig(tiles, problem.page_size, problem.ragged_queries, box, same_bits=one_rule)
    blocks = _most_blocks(problem, tiles.tokens)
    section, section_why = _section(problem, target)
    grid = max(1, min(target.processors, blocks * problem.heads_q // tiles.packed * parts))
    rows = f"boxes of {many(box, 'row')}" if box else "rows copied one by one"
    packed = f" of {tiles.packed} heads" if tiles.packed > 1 else ""

    def lines() -> tuple[str, ...]:
        return (
            f"tile {tiles.block_m}{packed} x {tiles.block_n}, {many(tiles.consumers, 'consumer warpgroup')}, rings K "
            f"{tiles.kv_stages} V {tiles.v_stages} Q {tiles.q_stages}, {rows}, {config.topology.smem_bytes} bytes of "
            "shared memory",
            f"at most {many(blocks, 'query block')} of {many(problem.heads_q, 'head')}, sections of "
            f"{many(section, 'head')}, {many(grid, 'CTA')}",
        )

    order_why = "a kernel of its own sorts the query blocks by the key tiles their lengths and the mask leave them"
    order = VarlenOrder(blocks, _candidates(problem, tiles.tokens), section)
    why = f"{best.why}; {split_why}" if parts > 1 else best.why
    rules = box_why, section_why, order_why, EARLY_AND_WAITS, COPY_RULE
    reasons = (why, row_words(best.candidate.tiling), *value_words(problem.dim_v, tiles.exact_values), *rules)
    return Choice("prefill_varlen", config, (grid,), lines, reasons, partitions=parts, order=order)


@lru_cache(maxsize=1024)
def _best_tile(typical: Problem, usual: SM90Config, why: str, same_bits: bool) -> Best:
    """The candidate with the least work for a `typical` sequence and no more than the usual one for a long sequence.
    `same_bits`: only the usual tile, since others sum other keys at a time or move references of rows by another rule
    (`weights_first`); the heads in it change no bit. Cached, since engines call with new lengths in
    every step and counting takes milliseconds."""
    own, counts, at_length = tiling(usual), KeyTiles(typical), _kept_tiles(replace(typical, seq_q=LONG, seq_k=LONG))
    first = _several_heads(Best(counts.candidate(own), usual, why), counts, at_length)
    tilings = tilings_beside(counts, first, _measured_tiles(own.wide))
    tilings = [x for x in tilings if x.shape == own.shape or not same_bits]
    least, *long_ones = at_length.candidates([own, *tilings])
    pairs = zip(counts.candidates(tilings), long_ones, strict=True)
    others = [x for x, long_one in pairs if long_one.head_microseconds <= least.head_microseconds]
    return best_of(typical, None, first, others, GAIN, SLOTS)


def _measured_tiles(wide: int) -> tuple[TileShape, ...]:
    """The tiles that were measured with ragged and paged batches, for head dims of at most `wide` columns."""
    return LENGTHS_TILES.get(64 if wide <= 64 else 128 if wide <= 128 else 0, ())


def _several_heads(one: Best, counts: KeyTiles, at_length: KeyTiles) -> Best:
    """The usual tile with as many packed query heads as it may hold, for sequences with a mask (as were measured),
    unless that is more work here or for long sequences. Packed rows see more similar spans, and one kernel serves more
    lengths."""
    if not (counts.masked and counts.all_known and one.config.eight_bit is None):
        return one
    own = one.candidate.tiling
    most = one.candidate.head_microseconds, at_length.candidate(own).head_microseconds
    for heads in sorted(packable(counts.problem), reverse=True):
        packed = own.with_heads(heads)
        several = counts.candidate(packed)
        work = several.head_microseconds, at_length.candidate(packed).head_microseconds
        if heads > 1 and work[0] <= most[0] and work[1] <= most[1]:
            return better(several, replace(one.config, packed=heads), one)
    return one


@lru_cache(64)
def _kept_tiles(problem: Problem) -> KeyTiles:
    """The counts of a long problem, cached."""
    return KeyTiles(problem)


def _near(length: int) -> int:
    """The length rounded up to four steps an octave."""
    step = 1 << max(0, length.bit_length() - 3)
    return -(-length // step) * step


def _typical(problem: Problem, options: PlanOptions, sequences: int) -> Problem:
    """The dense problem, with mean lengths, that is planned for."""
    if not problem.ragged_queries:
        return replace(problem, batch=1) if options.batch_invariant else problem
    batch = sequences or max(1, problem.batch)
    keys = problem.seq_k if problem.page_size else -(-problem.seq_k // batch)
    return replace(problem, batch=batch, seq_q=-(-problem.seq_q // batch), seq_k=keys)


def _box(page_size: int, block_n: int) -> tuple[int, str]:
    """(rows, reason) of a TMA box of keys; it divides a page and a tile."""
    if page_size == 0:
        return block_n, "sequences lie end to end: a box is a whole key tile"
    box = min(page_size & -page_size, block_n)
    if box < LEAST_BOX:
        what = f"pages of {many(page_size, 'key')} hold no box of {LEAST_BOX} rows"
        return 0, f"{what}: ordinary copies fetch them row by row"
    return box, f"pages of {page_size} keys: boxes of {box} rows divide them and the key tile"


def _most_blocks(problem: Problem, block_m: int) -> int:
    """Upper bound of the number of query blocks."""
    if problem.ragged_queries:
        return min(problem.seq_q, (problem.seq_q + problem.batch * (block_m - 1)) // block_m)
    return problem.batch * -(-problem.seq_q // block_m)


def _candidates(problem: Problem, block_m: int) -> int:
    """Places in the batch where a query block may begin."""
    if problem.ragged_queries:
        return problem.seq_q // block_m + problem.batch
    return problem.batch * max(1, -(-problem.seq_q // block_m))


def _section(problem: Problem, target: Arch) -> tuple[int, str]:
    """(query heads of a section, in whole groups that share keys; reason)."""
    keys = problem.seq_k * (1 if problem.kind == "ragged" else problem.batch)
    kv_bytes = problem.kv_element.bytes * max(keys, 1) * (problem.dim_qk + problem.dim_v)
    sections = min(problem.heads_kv, -(-problem.heads_kv // max(1, target.l2_keep // kv_bytes)))
    side_by_side = -(-problem.heads_kv // sections)
    even = f"{many(sections, 'even section')} of {many(side_by_side, 'key head')}"
    why = f"{even}, K and V within {target.l2_keep >> 20} MiB of L2"
    return side_by_side * (problem.heads_q // problem.heads_kv), why
