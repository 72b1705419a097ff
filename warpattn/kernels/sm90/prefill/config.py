"""SM90Config: tiles, rings, registers and shared memory of Hopper's prefill kernels. `choose_config` gives the usual
one for a pair of head dims, `with_tile` the same with another tile.

First: how the columns of a head dim are cut, into parts that are powers of two, and values into blocks with a launch
each. The kernel, the planner and the tests read this file, which imports no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

from warpattn.kernels.pieces.scheduler_sizes import SPLIT_TILE_FIELDS, TILE_FIELDS
from warpattn.kernels.topology import BARRIER_BYTES, Edge, Registers, Role, Signal, Topology
from warpattn.problem.element import FP16, Element
from warpattn.problem.operands import whole_runs

from ..operand_format import OperandFormat, WithOperands
from .eight_bit.sizes import EightBitSizes
from .exact_values import BOX_COLUMNS, ExactValues, multiplies_exactly

LEAST_PART = 16  # columns of the narrowest part of a head dim: the k of wgmma
MOST_VALUES = 256  # columns of values in one launch: their accumulator has 128 registers a thread
CONSUMER_ROWS = 64  # rows of one warpgroup: M of wgmma
SMEM_LIMIT = 232_448  # bytes: 227 KiB a CTA on sm_90
ALIGNMENT = 512  # bytes of shared memory that the compiler may add
ONE_SLOT = 448  # with wider queries only one slot of values fits beside them
RECOMPUTE_BARRIERS = 6  # of recompute.py: full and empty for one slot each of K, V and Q
LEFT_SLOTS = 4  # list heads, one for each warpgroup, see nonfinite.py
OTHER_REGISTERS = 30  # registers a thread, beside scores, weights and output
SPARE_REGISTERS = 33  # the same with other tiles: with 32 ptxas serialises some products (bench/notes.md 272)
CONVERT = "convert"  # the role that makes 16-bit tiles of 8-bit ones, see eight_bit/convert.py
CONVERT_REGISTERS = 48  # registers a thread of that role
WIDE_QUERIES = 256  # wider queries leave shared memory for only one query tile and 32 keys at a time
SHORT_ROWS = 2048  # up to so many queries at head dim 64, 128-row tiles fit a causal triangle better than 192-row ones
REGISTERS = {1: Registers(232, 24), 2: Registers(240, 24), 3: Registers(160, 32), 4: Registers(112, 32)}  # by consumers


@cache
def pad_dim(dim: int) -> int:
    """Head dim rounded up to a power of two, at least 32, as TMA boxes and register tensors need it."""
    return max(32, 1 << (dim - 1).bit_length())


@cache
def split_dim(dim: int) -> tuple[int, ...]:
    """Widths of the parts of a head dim, powers of two that add up to it or to a little more: 192 is 128 and 64.

    Head dims up to 32 and from 49 to 64 stay one part, because exponentials take longer than products there. So do
    those whose parts would not be faster: 112 columns in three took 1.06 times as long as 128 (H200).
    """
    whole = pad_dim(dim)
    columns = -(-dim // LEAST_PART) * LEAST_PART
    parts = tuple(width for width in (256, 128, 64, 32, LEAST_PART) if columns & width)
    return parts if whole >= 64 and columns < whole and len(parts) <= (2 if whole == 128 else 3) else (whole,)


@cache
def split_values(dim: int) -> tuple[int, ...]:
    """Widths of the parts of values; at most one is below 64.

    In P·V wgmma reads P from registers, and 16 or 32 columns then take as long as 64 (bench/notes.md, 222). So parts of
    32 and 16 columns become one of 64: 48 columns need one product instead of two, 176 two instead of three.
    """
    parts = split_dim(dim)
    return (*parts[:-2], 64) if parts[-2:] == (32, LEAST_PART) else parts


@cache
def value_blocks(dim_v: int) -> tuple[int, ...]:
    """First columns of the blocks of `block_columns(dim_v)` values that launches have."""
    return (0,) if dim_v <= MOST_VALUES else (0, dim_v - block_columns(dim_v))


@cache
def block_columns(dim_v: int) -> int:
    """Columns of a block of values, a whole number of runs; two blocks may overlap."""
    return dim_v if dim_v <= MOST_VALUES else whole_runs(-(-dim_v // 2))


@cache
def value_words(dim_v: int, exact: bool) -> tuple[str, ...]:
    """Why values have several launches, and whether products have exactly their columns; () if neither."""
    count, columns = len(value_blocks(dim_v)), block_columns(dim_v)
    words = (f"values of > {MOST_VALUES} columns: {count} launches of {columns}, each with all scores",) * (count > 1)
    return words + (f"P·V is one product of exactly {columns} columns: its padding costs nothing",) * exact


class TileShape(NamedTuple):
    """Warpgroups of 64 rows, keys of a tile, CTAs an SM. With the head dims it decides a tile's rate (rates.py)."""

    consumers: int
    keys: int
    ctas: int = 1


class KeyTileSizes(WithOperands):
    """Sizes that follow from a config's element, head dims (as kernels pad them) and keys per tile."""

    block_n: int
    padded_qk: int
    padded_v: int

    @cached_property
    def operand(self) -> Element:
        """Element of Q and K as wgmma operands; 8-bit keys become fp16, exactly."""
        plain = self.eight_bit is None or self.eight_bit.widened or self.products
        return self.element if plain else FP16

    @cached_property
    def weights(self) -> Element:
        """Element of P and V as wgmma operands in prefill; a weight times a token's scale may exceed fp16."""
        return self.element if self.eight_bit and self.eight_bit.of_token("v") else self.operand

    @property
    def products(self) -> bool:
        """Whether wgmma multiplies 8-bit operands; values are then transposed (eight_bit/transpose_values.py)."""
        return self.element.bytes == 1

    @property
    def depth(self) -> int:
        """k of one wgmma in elements: 32 bytes."""
        return 32 // self.element.bytes

    @property
    def loaded(self) -> Element:
        """Element of K and V in their slots."""
        return self.element

    @cached_property
    def k_bytes(self) -> int:
        """Bytes of a K tile."""
        return self.loaded.bytes * self.block_n * self.padded_qk

    @cached_property
    def v_bytes(self) -> int:
        """Bytes of a V tile."""
        return self.loaded.bytes * self.block_n * self.padded_v


@dataclass(frozen=True)
class SM90Config(KeyTileSizes, EightBitSizes, ExactValues):
    """Tile sizes and resources of one compiled kernel.

    `consumers` warpgroups, each with 64 query rows, read the same key tiles of `block_n` keys from rings of `kv_stages`
    slots. The Q ring has `q_stages` slots: with two, the next tile's queries arrive during this tile's work. Warpgroups
    stage their whole output in shared memory if `stores_whole`, else `store_parts[0]` columns at a time.
    """

    operands: OperandFormat
    consumers: int
    block_n: int
    kv_stages: int
    q_stages: int
    store_parts: tuple[int, ...]
    registers: Registers
    take_turns: bool  # warpgroups issue to the tensor core in a fixed order; at head dim 256 it pays under a mask
    packed: int = 1  # query heads in a tile, a divisor of the group: rows are (token, head)
    split: bool = False  # split-KV: several CTAs share the keys of a tile and write partial outputs in fp32
    ctas: int = 1  # CTAs an SM
    one_copy: bool = False  # warpgroups run the first one's code, see runtime/shared_code

    @property
    def held_parts(self) -> int:
        """Last parts of Q kept in registers, where shared memory is too slow for wgmma."""
        return int(len(self.qk_parts) > 1 and 160 < self.wide < 256)

    @property
    def v_stages(self) -> int:
        """Slots of the V ring."""
        return self.kv_stages if self.padded_qk <= ONE_SLOT else 1

    @property
    def out(self) -> Element:
        """Element of the output."""
        return self.operands.out_element or self.element

    @property
    def first_value(self) -> int:
        return self.operands.first_value  # first of its `dim_v` columns of values and output

    def from_value(self, column: int) -> SM90Config:  # for values from `column` on
        return replace(self, operands=replace(self.operands, first_value=column))

    @property
    def converts(self) -> bool:
        """Whether a warpgroup widens 8-bit tiles (eight_bit/convert.py)."""
        return self.eight_bit is not None and not self.eight_bit.widened and not self.products

    @property
    def widened(self) -> bool:
        """Whether keys and values are 16-bit copies of 8-bit ones (sm90/copies)."""
        return self.eight_bit is not None and self.eight_bit.widened

    @cached_property
    def qk_parts(self) -> tuple[int, ...]:
        """Columns of the parts of Q and K."""
        return (pad_dim(self.dim_qk),) if self.products else split_dim(self.dim_qk)

    @cached_property
    def v_parts(self) -> tuple[int, ...]:
        """Columns of the parts of V. With a converting warpgroup, one instruction may use at most 128 registers,
        too few for 256 columns."""
        if self.exact_values:
            return (BOX_COLUMNS,) * -(-self.dim_v // BOX_COLUMNS)
        parts = (pad_dim(self.dim_v),) if self.products else split_values(self.dim_v)
        return (128, 128) if self.converts and parts == (256,) else parts

    @cached_property
    def parts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Columns of the parts of K and of V."""
        return self.qk_parts, self.v_parts

    @cached_property
    def padded_qk(self) -> int:
        return sum(self.qk_parts)

    @cached_property
    def padded_v(self) -> int:
        return sum(self.v_parts)

    @cached_property
    def columns_v(self) -> int:
        """Columns of the output that are computed."""
        return self.dim_v if self.exact_values else self.padded_v

    @cached_property
    def wide(self) -> int:
        return max(self.padded_qk, self.columns_v)

    @property
    def tile_shape(self) -> TileShape:
        return TileShape(self.consumers, self.block_n, self.ctas)

    @cached_property
    def rows(self) -> int:
        return CONSUMER_ROWS

    @cached_property
    def block_m(self) -> int:
        return CONSUMER_ROWS * self.consumers

    @cached_property
    def wg_tokens(self) -> int:
        """Query tokens of one warpgroup's rows."""
        return CONSUMER_ROWS // self.packed

    @cached_property
    def tokens(self) -> int:
        """Query tokens of a tile."""
        return self.wg_tokens * self.consumers

    @cached_property
    def q_bytes(self) -> int:
        return self.element.bytes * self.block_m * self.padded_qk

    @property
    def overlaps(self) -> bool:
        """Whether P·V of a key tile runs beside the softmax of the next one: registers hold both."""
        numbers = self.block_n // 2 + self.columns_v // 2 + self.block_n * self.element.bytes // 8
        return numbers + OTHER_REGISTERS <= self.registers.consumer

    @cached_property
    def out_bytes(self) -> int:
        return (4 if self.split else self.out.bytes) * self.block_m * sum(self.store_parts)

    def shares_code(self, masked: bool, long: bool = False) -> bool:
        """Whether the warpgroups run faster with one shared copy of their code (bench/notes.md, 215).
        `long`: rows see thousands of keys, so that the code between two loops over keys does not matter.

        They do where a mask makes the code long, where products do not overlap, and with four warpgroups. Otherwise all
        may want the tensor core at once, and then none: it was up to 7 % slower without a mask, and 2 % in long rows.
        """
        return self.may_share_code and (self.consumers > 3 or (not long and (masked or not self.overlaps)))

    @property
    def may_share_code(self) -> bool:
        """Whether they may share code at all: head dim 256 was 14 % slower with it, and at 192 their code differs."""
        return self.padded_qk <= 128 and (self.take_turns or self.consumers > 3)

    @property
    def max_registers(self) -> int:
        """Registers a thread at launch, so that `ctas` blocks fit on an SM."""
        return 65536 // (self.topology.threads * self.ctas) // 8 * 8

    @cached_property
    def topology(self) -> Topology:
        """Roles and rings of a CTA of the dense kernel."""
        return self.topology_with(SPLIT_TILE_FIELDS if self.split else TILE_FIELDS)

    def topology_with(self, tile_fields: int) -> Topology:
        """Roles and rings of a kernel that publishes `tile_fields` int32 about the tile with each Q slot."""
        attend = tuple(f"attend {wg}" for wg in range(self.consumers))
        roles = [Role(name, 4, self.registers.consumer) for name in attend]
        filling, readers, signals, scales = "load", attend, (), 0
        if self.converts:
            scales = self.scale_bytes + self.factor_bytes
            roles.append(Role(CONVERT, 4, CONVERT_REGISTERS))
            filling, readers = CONVERT, (*attend, CONVERT)
            loaded = (("load",),) * self.kv_stages
            signals = (Signal("K loaded", loaded), Signal("V loaded", loaded))
        edges = (
            Edge("Q", "load", readers, self.q_stages, self.q_bytes),
            Edge("K", filling, attend, self.kv_stages, self.k_bytes),
            Edge("V", filling, attend, self.v_stages, self.v_bytes),
        )
        fields = 4 * (tile_fields * self.q_stages + LEFT_SLOTS) + RECOMPUTE_BARRIERS * BARRIER_BYTES
        private = self.out_bytes + scales + fields
        return Topology((*roles, Role("load", 1, self.registers.producer)), edges, private, signals)

    @cached_property
    def smem_bytes(self) -> int:
        """Bytes of tiles and barriers; the compiler adds a few."""
        return self.topology.smem_bytes


def choose_config(element: Element, dim_qk: int, dim_v: int, seq_q: int, masked: bool) -> tuple[SM90Config, str]:
    """The configuration that measured best for a pair of head dims, and one sentence why (cycles: bench/notes.md).
    Values of more than 256 columns have several launches; the configuration is for the columns of one. `masked`: the
    mask hides some keys, so tiles differ in length.
    """
    dim_v = block_columns(dim_v)
    qk, v = split_dim(dim_qk), split_values(dim_v)
    wide = max(sum(qk), sum(v))
    exact = pad_dim(dim_v) > dim_v and multiplies_exactly(dim_qk, dim_v, not masked and seq_q > 512)
    operands = OperandFormat(element, dim_qk, dim_v, exact_values=exact)
    if sum(qk) > WIDE_QUERIES:
        why = f"queries of > {WIDE_QUERIES} columns: 32 keys a tile, one query tile, output stored in column blocks"
        return fit_output(SM90Config(operands, 2, 32, 2, 1, v, Registers(240, 24), False)), why
    if wide <= 64 and masked and seq_q <= SHORT_ROWS:
        why = f"head dim <= 64, a mask and at most {SHORT_ROWS} queries: 128-row tiles waste less of the diagonal"
        return SM90Config(operands, 2, 128, 4, 2, v, Registers(240, 24), True), why
    if wide <= 64:
        why = "head dim <= 64: exponentials take as long as products, so three warpgroups hide them better"
        return SM90Config(operands, 3, 128, 2, 2, v, Registers(160, 32), True), why
    if wide <= 128:
        why = "head dim <= 128: two warpgroups and 128 keys fill registers and shared memory with two query tiles"
        return SM90Config(operands, 2, 128, 2 if exact else _stages(wide), 2, v, Registers(240, 24), True), why
    if wide <= 160 or (wide <= 192 and sum(v) <= 128):
        why = "head dim <= 160, or <= 192 with values of <= 128: 128 keys a tile, with one query tile they fit"
        return fit_output(SM90Config(operands, 2, 128, 2, 1, v, Registers(240, 24), True)), why
    if wide < 256:
        why = "head dim > 160: 64 keys a tile, one query tile, the last part of Q in registers"
        return fit_output(SM90Config(operands, 2, 64, 2, 1, v, Registers(240, 24), True)), why
    why = "head dim > 224: 64 keys a tile, one query tile, output stored in column blocks, to fit shared memory"
    return fit_output(SM90Config(operands, 2, 64, 2, 1, v, Registers(240, 24), masked)), why


def _stages(columns: int) -> int:
    """Slots of unpadded K and V with 128 keys a tile; 3 instead of 2 gained 2 % at head dim 96 (H200)."""
    return 4 if columns <= 80 else 3 if columns <= 96 else 2


def fit_output(config: SM90Config) -> SM90Config:
    """The config with narrower column blocks of the output where the whole one exceeds shared memory."""
    widest = 128 if config.block_n == 64 else 64
    widths = (widest, 64, 32) if config.exact_values else (min(widest, config.v_parts[-1]),)
    sizes = [config, *(replace(config, store_parts=(columns,)) for columns in widths)]
    return next((one for one in sizes if one.smem_bytes + ALIGNMENT <= SMEM_LIMIT), sizes[-1])


@lru_cache(256)
def with_tile(usual: SM90Config, tile: TileShape, slots: int = 2) -> SM90Config | None:
    """The configuration with another tile and the deepest rings that fit: max(`slots`, 256 keys), else 4, 3 or 2 slots.
    None if two slots do not fit in shared memory or the tile does not fit in registers."""
    registers = REGISTERS[tile.consumers]
    held = usual.held_parts * usual.qk_parts[-1] // 4  # registers: 64 rows of 16 bits over 128 threads
    if tile.keys // 2 + usual.columns_v // 2 + held + SPARE_REGISTERS > registers.consumer:
        return None
    if tile.ctas == 1:
        registers = replace(registers, producer=max(registers.producer, usual.registers.producer))
    whole = split_values(usual.dim_v) if usual.exact_values else usual.v_parts
    config = replace(
        usual, consumers=tile.consumers, block_n=tile.keys, store_parts=whole, ctas=tile.ctas,
        registers=registers, take_turns=tile.consumers in (2, 3),
    )  # fmt: skip
    depths = dict.fromkeys((max(slots, 256 // tile.keys), 4, 3, 2))
    rings = (fit_output(replace(config, q_stages=q, kv_stages=kv)) for q in (2, 1) for kv in depths)
    return next((ring for ring in rings if (ring.smem_bytes + 2 * ALIGNMENT) * ring.ctas <= SMEM_LIMIT), None)
