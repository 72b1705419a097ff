"""SM90Config: tiles, rings, registers and shared memory of the Hopper prefill kernel; which one a pair of head dims
usually gets, and the same with another tile.

The kernel, the planner and the tests all read them here. Nothing in this file imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from warpattn.kernels.pieces.scheduler_sizes import SPLIT_TILE_FIELDS, TILE_FIELDS
from warpattn.kernels.topology import BARRIER_BYTES, Edge, Registers, Role, Signal, Topology
from warpattn.problem import Problem
from warpattn.problem.element import FP16, Element
from warpattn.problem.problem import Scales
from warpattn.problem.scales import EightBit

from ..copies.config import of_token
from ..operand_format import OperandFormat, WithOperands
from ..widths import block_columns, pad_dim, split_dim, split_values
from .eight_bit.sizes import EightBitSizes

CONSUMER_ROWS = 64  # rows of one warpgroup: M of wgmma
SMEM_LIMIT = 232_448  # 227 KiB of a block on sm_90
ALIGNMENT = 512  # bytes that the compiler may add
ONE_SLOT = 448  # columns of queries up to which there are two slots of values beside them
RECOMPUTE_BARRIERS = 6  # of recompute.py: full and empty of a slot each for K, V and Q
LEFT_SLOTS = 4  # a list for each warpgroup, see nonfinite.py
OTHER_REGISTERS = 30  # of a thread, beside scores, weights and output
CONVERT = "convert"  # the role that makes 16-bit tiles of 8-bit ones, see eight_bit/convert.py
CONVERT_REGISTERS = 48  # of that role
WIDE_QUERIES = 256  # columns: of more, shared memory has a query tile and 32 keys at a time
SHORT_ROWS = 2048  # queries up to which, at head dim 64, 128-row tiles fit a causal triangle better than 192-row ones
REGISTERS = {1: Registers(232, 24), 2: Registers(240, 24), 3: Registers(160, 32), 4: Registers(112, 32)}  # by consumers


class TileShape(NamedTuple):
    """Warpgroups of 64 rows, keys of a tile, CTAs on an SM: what a rate depends on, beside the head dims (rates.py)."""

    consumers: int
    keys: int
    ctas: int = 1


class KeyTileSizes(WithOperands):
    """Sizes that follow from the element, the head dims and the keys of a tile of a config."""

    block_n: int

    @cached_property
    def operand(self) -> Element:
        """Of queries and keys where they are multiplied: all 8-bit values are fp16 ones, too."""
        plain = self.eight_bit is None or self.eight_bit.widened or self.products
        return self.element if plain else FP16

    @cached_property
    def weights(self) -> Element:
        """Of weights and values there, in prefill: fp16 does not hold weights times any scale."""
        return self.element if self.eight_bit and self.eight_bit.of_token("v") else self.operand

    @property
    def products(self) -> bool:
        """Whether operands of products have 8 bits; values are transposed then (eight_bit/transpose_values.py)."""
        return self.element.bytes == 1

    @property
    def overlaps(self) -> bool:
        return True  # P·V of a key tile runs beside the softmax of the next one

    @property
    def depth(self) -> int:
        """Columns of an operand that one wgmma takes: 32 bytes."""
        return 32 // self.element.bytes

    def padded(self, dim: int) -> int:
        """Columns of a tile for a head dim."""
        return pad_dim(dim)

    @cached_property
    def padded_qk(self) -> int:
        return self.padded(self.dim_qk)

    @cached_property
    def padded_v(self) -> int:
        return self.padded(self.dim_v)

    @property
    def loaded(self) -> Element:
        """Of keys and values in their slots."""
        return self.element

    @cached_property
    def k_bytes(self) -> int:
        """Of a tile of keys."""
        return self.loaded.bytes * self.block_n * self.padded_qk

    @cached_property
    def v_bytes(self) -> int:
        """Of a tile of values."""
        return self.loaded.bytes * self.block_n * self.padded_v


@dataclass(frozen=True)
class SM90Config(KeyTileSizes, EightBitSizes):
    """Tile sizes and resources of one compiled kernel.

    `consumers` warpgroups of 64 query rows each share one stream of key tiles of `block_n` keys in rings of `kv_stages`
    slots. The Q ring has `q_stages` slots: with two, the next tile's queries arrive during this tile's work. The output
    goes through shared memory all at once where `store_parts` are those of the head dim, else one block of so many
    columns after the other.
    """

    operands: OperandFormat
    consumers: int
    block_n: int
    kv_stages: int
    q_stages: int
    store_parts: tuple[int, ...]
    registers: Registers
    take_turns: bool  # warpgroups issue to the tensor core in a fixed order
    packed: int = 1  # query heads of a tile, a power of two that divides the group: rows are (token, head)
    held_parts: int = 0  # last parts of Q that a warpgroup keeps in registers, as wgmma waits for shared memory
    split: bool = False  # keys of a tile are shared out over CTAs; outputs of parts are in fp32
    ctas: int = 1  # on an SM

    @property
    def v_stages(self) -> int:
        """Slots of the ring of values."""
        return self.kv_stages if self.padded_qk <= ONE_SLOT else 1

    @property
    def out(self) -> Element:
        """Of the output."""
        return self.operands.out_element or self.element

    @property
    def first_value(self) -> int:
        return self.operands.first_value  # column of values and output that its `dim_v` begin with

    def from_value(self, column: int) -> SM90Config:  # the same for values from a column on
        return replace(self, operands=replace(self.operands, first_value=column))

    @property
    def converts(self) -> bool:
        """Whether a warpgroup makes 16-bit tiles of 8-bit ones (eight_bit/convert.py)."""
        return self.eight_bit is not None and not self.eight_bit.widened and not self.products

    @property
    def widened(self) -> bool:
        """Whether keys and values are 16-bit copies of 8-bit ones (sm90/copies)."""
        return self.eight_bit is not None and self.eight_bit.widened

    def with_scales(self, problem: Problem) -> SM90Config:
        """The same over copies of the problem's 8-bit keys and values, if it has such, whose scales are left."""
        if problem.kv_dtype is None:
            return self
        left = Scales(*(None if of_token(scale) else scale for scale in problem.scales))
        return replace(self, operands=replace(self.operands, eight_bit=EightBit(self.element, left)))

    @cached_property
    def qk_parts(self) -> tuple[int, ...]:
        """Columns of the parts of Q and K."""
        return (pad_dim(self.dim_qk),) if self.products else split_dim(self.dim_qk)

    @cached_property
    def v_parts(self) -> tuple[int, ...]:
        """Columns of the parts of V and O. Beside a converting warpgroup the compiler has 128 registers for an
        instruction, too few for 256 columns."""
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
    def wide(self) -> int:
        return max(self.padded_qk, self.padded_v)

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
    def packed_bits(self) -> int:
        """Of a row's head within the tile."""
        return self.packed.bit_length() - 1

    @cached_property
    def q_bytes(self) -> int:
        return self.element.bytes * self.block_m * self.padded_qk

    @property
    def overlaps(self) -> bool:
        numbers = self.block_n // 2 + self.padded_v // 2 + self.block_n * self.element.bytes // 8
        return numbers + OTHER_REGISTERS <= self.registers.consumer

    @cached_property
    def out_bytes(self) -> int:
        return (4 if self.split else self.out.bytes) * self.block_m * sum(self.store_parts)

    def shares_code(self, masked: bool, long: bool = False) -> bool:
        """Whether one copy of the loop over tiles is faster for all warpgroups than one for each (bench/notes.md, 215).
        `long`: rows see thousands of keys, so that what comes between the loops over keys does not matter.

        It is where a mask makes the loop long, where products do not overlap, and for four warpgroups. Else warpgroups
        may fall into step, and use the tensor core and the ordinary units at the same time: without a mask they were up
        to 7 % slower, and in long rows 2 %.
        """
        return self.alike and (self.consumers > 3 or (not long and (masked or not self.overlaps)))

    @property
    def alike(self) -> bool:
        """Whether warpgroups may share code at all: head dim 256, without turns, was 14 % slower for it, and of those
        between only 192 was tried, whose two warpgroups' code differs."""
        return self.padded_qk <= 128 and (self.take_turns or self.consumers > 3)

    @property
    def max_registers(self) -> int:
        """Registers a thread at launch, so that `ctas` blocks fit on an SM."""
        return 65536 // (self.topology.threads * self.ctas) // 8 * 8

    @cached_property
    def topology(self) -> Topology:
        """Roles and rings of a block of the dense kernel."""
        return self.topology_with(SPLIT_TILE_FIELDS if self.split else TILE_FIELDS)

    def topology_with(self, tile_fields: int) -> Topology:
        """The same for a kernel that publishes `tile_fields` int32 of a tile with each Q slot."""
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
        """Shared memory of tiles and barriers; the compiler adds alignment and a few bytes."""
        return self.topology.smem_bytes


def choose_config(element: Element, dim_qk: int, dim_v: int, seq_q: int, masked: bool) -> tuple[SM90Config, str]:
    """The measured best configuration for a pair of head dims, and one sentence why (cycles: bench/notes.md); of values
    that have several launches, for the columns of one.

    `masked`: the mask hides some keys, so tiles differ in length.
    """
    dim_v = block_columns(dim_v)
    qk, v = split_dim(dim_qk), split_values(dim_v)
    wide, held = max(sum(qk), sum(v)), int(len(qk) > 1)
    operands = OperandFormat(element, dim_qk, dim_v)
    if sum(qk) > WIDE_QUERIES:
        why = f"queries of > {WIDE_QUERIES} columns: 32 keys a tile, one query tile, output stored in column blocks"
        return stored(SM90Config(operands, 2, 32, 2, 1, v, Registers(240, 24), False)), why
    if wide <= 64 and masked and seq_q <= SHORT_ROWS:
        why = f"head dim <= 64, a mask and at most {SHORT_ROWS} queries: 128-row tiles waste less of the diagonal"
        return SM90Config(operands, 2, 128, 4, 2, v, Registers(240, 24), True), why
    if wide <= 64:
        why = "head dim <= 64: exponentials take as long as products, so three warpgroups hide them better"
        return SM90Config(operands, 3, 128, 2, 2, v, Registers(160, 32), True), why
    if wide <= 128:
        why = "head dim <= 128: two warpgroups and 128 keys fill registers and shared memory with two query tiles"
        return SM90Config(operands, 2, 128, _stages(wide), 2, v, Registers(240, 24), True), why
    if wide <= 160 or (wide <= 192 and sum(v) <= 128):
        why = "head dim <= 160, or <= 192 with values of <= 128: 128 keys a tile, with one query tile they fit"
        held = held if wide > 160 else 0
        return stored(SM90Config(operands, 2, 128, 2, 1, v, Registers(240, 24), True, held_parts=held)), why
    if wide < 256:
        why = "head dim > 160: 64 keys a tile, one query tile, the last part of Q in registers"
        return stored(SM90Config(operands, 2, 64, 2, 1, v, Registers(240, 24), True, held_parts=held)), why
    why = "head dim > 224: 64 keys a tile, one query tile, output stored in column blocks, to fit shared memory"
    return stored(SM90Config(operands, 2, 64, 2, 1, v, Registers(240, 24), False)), why


def _stages(columns: int) -> int:
    """Slots of the rings of K and V with 128 keys a tile: 3 instead of 2 gained 2 % at head dim 96 (H200)."""
    return 4 if columns <= 80 else 3 if columns <= 96 else 2


def stored(config: SM90Config) -> SM90Config:
    """The config with as many columns of the output stored at once as there is memory for; no fewer than are fast."""
    if config.smem_bytes + ALIGNMENT <= SMEM_LIMIT:
        return config
    widest = 128 if config.block_n == 64 else 64
    return replace(config, store_parts=(min(widest, config.v_parts[-1]),))


@lru_cache(256)
def with_tile(usual: SM90Config, tile: TileShape, slots: int = 2) -> SM90Config | None:
    """The configuration with another tile and the deepest rings that shared memory holds, of `slots` or 256 keys at
    first, if that holds two slots and registers the tile."""
    registers = REGISTERS[tile.consumers]
    if tile.keys // 2 + usual.padded_v // 2 + OTHER_REGISTERS > registers.consumer:
        return None
    if tile.ctas == 1:
        registers = replace(registers, producer=max(registers.producer, usual.registers.producer))
    config = replace(
        usual, consumers=tile.consumers, block_n=tile.keys, store_parts=usual.v_parts, ctas=tile.ctas,
        registers=registers, take_turns=tile.consumers in (2, 3),
    )  # fmt: skip
    depths = dict.fromkeys((max(slots, 256 // tile.keys), 4, 3, 2))
    rings = (stored(replace(config, q_stages=q, kv_stages=kv)) for q in (2, 1) for kv in depths)
    return next((ring for ring in rings if (ring.smem_bytes + 2 * ALIGNMENT) * ring.ctas <= SMEM_LIMIT), None)
