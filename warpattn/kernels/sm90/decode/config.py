"""DecodeConfig: the shape of the Hopper decode kernel as a value, and how its keys are shared out.

Decode reads every key and value once for a few query rows, so memory is all that counts: rings just deep enough to keep
it busy, every CTA at work to the end. Nothing in this file imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from warpattn.kernels.topology import Edge, Role, Topology
from warpattn.problem.element import Element

from ..prefill.config import CONSUMER_ROWS, SMEM_LIMIT, pad_dim

SM_SMEM = 233_472  # 228 KiB of an SM, of which every resident block takes 1 KiB for itself
SLACK = 512  # bytes the compiler adds: alignment of barriers, scratch of reductions
INVARIANT_KEYS = 2048  # keys of a partial when results must not depend on the rest of the batch
GROWTH = 512  # keys: reading them takes an SM about as long as a second item costs it (bench/notes.md)
IN_FLIGHT = 128 * 1024  # bytes of K and V that an SM waits for at a time: with more, SMs finish further apart
EARLY = 192 * 1024  # bytes of a ring that is filled before the launch in front has ended
PACED = 2  # tiles of such a ring that are on their way at a time
SHORT_ROW = 64  # columns
SPREAD = 3  # heads of a CTA from which every n-th is faster than n in a row (bench/notes.md)
FEW_ROWS = (8, 16)  # columns of products with keys on the left; values must fill their 64 rows
TILE_BYTES = 32 * 1024  # of K: with less, a warpgroup comes to its barriers too often
LEAST_BOX = 8  # rows: the swizzle of shared memory repeats after 8, and a copy must start where it does


@dataclass(frozen=True)
class DecodeConfig:
    """Tiles and resources of one compiled decode kernel.

    One warp loads key tiles of `block_n` keys into rings of `stages` slots, one warpgroup attends for up to 64 rows
    (query tokens × the heads of a group), or for `few_rows` with the operands of both products exchanged. Work is
    counted in units of `unit` key tiles. With `invariant` every unit is a partial of its own, so that a sequence's bits
    depend on its own length only; without, a CTA's run of units in one head is one partial, and each head costs `price`
    units more than its keys: query, first scores and output overlap with nothing, so many short heads take longer than
    one long one with as many keys.
    """

    element: Element  # of q, keys, values and out
    dim_qk: int
    dim_v: int
    block_n: int
    stages: int
    ctas: int  # per SM
    unit: int  # key tiles
    invariant: bool = False
    page_box: int = 0  # rows of a page that one copy reads: a power of two; 0 for keys in one piece
    has_lengths: bool = False  # lengths are read from a tensor
    uniform: bool = False  # every head of the batch has equally many key tiles: nothing to add up
    spread: bool = False  # CTAs take every n-th head instead of n in a row, see `spread_place`
    plan_width: int = 128  # entries (row tiles of sequences) whose key tiles are added up at once
    plan_once: bool = True  # all entries are
    plan_lane: int = 1  # of them one after the other in a lane; plan_width / 32: every warp adds up all by itself
    price: int = 0  # of a head, in units
    combine_few: int = 16  # parts from 2 to this are added up by shorter code; 0: none
    combine_apart: bool = False  # parts are added up by a kernel of its own
    few_rows: int = 0  # rows of queries, 8 or 16, that keys multiply from the left; 0: 64 rows on the left
    query_rows: int = 0  # with few rows: of them, 4, 8 or 16 at most that are queries
    ahead: bool = False  # may come before the launch in front has ended, and waits for that
    settled: bool = False  # all but new tokens' keys and values were written before: they are read before that wait
    under_way: int = 0  # slots of a ring whose tiles are on their way at a time; 0: all
    prefetched: int = 0  # key tiles of a CTA of which keys are asked for in L2 before that wait
    hands_over: int = 0  # units of a CTA's run up to which it lets the next launch come before its own last keys
    part_left: int = 32  # one part of a run in so many is left then
    one_tile: bool = False  # a key head has one row tile: no other CTA reads its keys, so they may leave L2 first
    consumer_registers: int = 240
    producer_registers: int = 152

    @cached_property
    def padded_qk(self) -> int:
        return pad_dim(self.dim_qk)

    @cached_property
    def padded_v(self) -> int:
        return pad_dim(self.dim_v)

    @property
    def rows(self) -> int:
        """Rows of a tile of queries."""
        return self.few_rows or CONSUMER_ROWS

    @property
    def kept_rows(self) -> int:
        """Rows of a tile's results that are kept: those of a warpgroup, 4 columns a thread, at least."""
        return max(self.query_rows, 4 * max(1, 128 // self.padded_v)) if self.few_rows else CONSUMER_ROWS

    @property
    def box(self) -> int:
        """Keys of one copy."""
        return min(self.block_n, self.page_box) if self.page_box else self.block_n

    @property
    def boxes(self) -> int:
        """Copies that make a key tile."""
        return self.block_n // self.box

    @property
    def gathers(self) -> bool:
        """Whether pages are too odd for TMA, so that rows are copied one by one."""
        return 0 < self.page_box < LEAST_BOX

    @property
    def growth(self) -> int:
        """Units that a CTA's run may grow by where heads then end with runs."""
        return max(1, GROWTH // (self.block_n * self.unit))

    @property
    def k_bytes(self) -> int:
        return self.element.bytes * self.block_n * self.padded_qk

    @property
    def v_bytes(self) -> int:
        return self.element.bytes * self.block_n * self.padded_v

    @property
    def k_cols(self) -> int:
        """Columns of a copy of keys."""
        return self.padded_qk

    @property
    def v_cols(self) -> int:
        """Columns of a copy of values."""
        return self.padded_v

    @property
    def combine_cols(self) -> int:
        """Columns that a program of the combining kernel has."""
        return self.padded_v

    @property
    def tiles_outermost(self) -> bool:
        """Whether the line of entries has the first row tiles of all sequences, then the second ones, and so on, so
        that CTAs which run at the same time read the same keys."""
        return False

    @property
    def words(self) -> str:
        """Tile and rings, for people."""
        return f"tile {self.rows} x {self.block_n}, rings K {self.stages} V {self.stages}"

    @property
    def q_bytes(self) -> int:
        return self.element.bytes * self.rows * self.padded_qk

    @property
    def private_bytes(self) -> int:
        """Shared memory that the warpgroup has for itself: queries; with few rows, also a tile of P, and the output
        while its rows and columns are exchanged."""
        p_bytes = self.element.bytes * self.rows * self.block_n
        return self.q_bytes + (4 * self.rows * (self.padded_v + 5) + p_bytes if self.few_rows else 0)

    @cached_property
    def topology(self) -> Topology:
        """Roles and rings of a block."""
        attend = Role("attend", 4, self.consumer_registers)
        edges = (
            Edge("K", "load", ("attend",), self.stages, self.k_bytes),
            Edge("V", "load", ("attend",), self.stages, self.v_bytes),
        )
        return Topology((attend, Role("load", 1, self.producer_registers)), edges, self.private_bytes)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of tiles and barriers (the compiler adds `SLACK` at most)."""
        return self.topology.smem_bytes

    @property
    def max_registers(self) -> int:
        """Registers a thread at launch, so that `ctas` blocks fit on an SM."""
        return 65536 // (self.topology.threads * self.ctas) // 8 * 8


def choose_decode(
    element: Element, dim_qk: int, dim_v: int, page_size: int = 0, ctas: int | None = None, rows: int = CONSUMER_ROWS
) -> DecodeConfig:
    """The configuration for a pair of head dims, `page_size` keys a page (0: not paged), `ctas` blocks an SM, and for
    `rows` rows of queries a key head.

    Two blocks where rows of keys are short, but come through pages or meet 64 rows of queries: a tile of 64 columns
    arrives as fast as one warpgroup attends to it, so one CTA's softmax has the other's beside it (bench/notes.md).
    """
    wide = max(pad_dim(dim_qk), pad_dim(dim_v))
    box = page_size & -page_size
    few = next((size for size in FEW_ROWS if rows <= size), 0) if pad_dim(dim_v) >= CONSUMER_ROWS else 0
    gathers = 0 < box < LEAST_BOX  # pointers of more rows would not fit into the producer's registers
    if ctas is None:
        ctas = 2 if wide <= SHORT_ROW and not gathers and (box or not few) else 1
    largest = TILE_BYTES // (element.bytes * wide) if few else 128 if wide <= 128 else 64
    block_n = 64 if gathers or ctas > 1 else largest
    config = DecodeConfig(element, dim_qk, dim_v, block_n, 2, ctas, 1, page_box=box, few_rows=few)
    config = replace(config, query_rows=next(n for n in (4, 8, 16) if rows <= n) if few else 0)
    if gathers:
        config = replace(config, producer_registers=232)
    if ctas > 1:
        config = replace(config, consumer_registers=0, producer_registers=40)
        config = replace(config, consumer_registers=(2 * config.max_registers - 40) // 8 * 8)
    return replace(config, stages=deepest(config))


def even_cut(heads: int, ctas: int) -> tuple[int, int]:
    """(equal parts of a head, heads of a CTA), one of them 1, that keep `ctas` CTAs busy with `heads` of one length."""
    splits = max(1, ctas // max(heads, 1))
    return splits, -(-heads // ctas) if splits == 1 else 1


def shorter(config: DecodeConfig) -> DecodeConfig:
    """The same with key tiles and bytes under way halved, for heads that are split: what a CTA does behind its last
    keys is the tail of the launch, and half a tile is done sooner. Whole heads are read better in longer tiles."""
    if config.few_rows == 0 or config.ctas > 1 or config.block_n < 128:
        return config
    return replace(config, block_n=config.block_n // 2, stages=2)


def near_parts(parts: int, config: DecodeConfig) -> int:
    """Parts up to which the short code adds up a head that has `parts` of them if it is cut evenly: a power of two, so
    that kernels are few, and no more than the registers hold."""
    return min(1 << max(1, (parts - 1).bit_length()), 32, 4096 // config.padded_v)


def spreads(heads: int, ctas: int) -> bool:
    """Whether each of `ctas` CTAs better takes every n-th of `heads` heads of one length."""
    whole = even_cut(heads, ctas)[1]
    return whole >= SPREAD and heads % whole == 0


def deepest(config: DecodeConfig, under_way: int = IN_FLIGHT) -> int:
    """Ring slots that fit beside the queries; no more than for so many bytes `under_way` on an SM, but two."""
    limit = min(SMEM_LIMIT, SM_SMEM // config.ctas - 1024) - SLACK - config.private_bytes
    fit = limit // (config.k_bytes + config.v_bytes + 32)
    busy = under_way // config.ctas // (config.k_bytes + config.v_bytes)
    return max(1, min(fit, max(2, busy)))


def early(config: DecodeConfig) -> DecodeConfig:
    """The same for a settled cache. With few rows: a deep ring of short tiles, so that CTAs which have come early have
    something to do; no more of them under way than in other rings, so that CTAs which still run are not held up; and as
    those to come will not hold up this one, they may come early, too. With 64 rows products take longer, and shorter
    tiles would not pay."""
    config = replace(config, settled=True)
    if config.few_rows == 0:
        return config
    config = shorter(config)
    config = replace(config, stages=deepest(config, EARLY), part_left=4)
    return replace(config, under_way=PACED if config.stages > PACED else 0)


def invariant(config: DecodeConfig) -> DecodeConfig:
    """The same with results that do not depend on the rest of the batch."""
    return replace(config, invariant=True, unit=max(1, INVARIANT_KEYS // config.block_n))
