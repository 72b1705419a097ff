"""MlaConfig: configuration of Hopper's kernel for latent attention (MLA, absorbed), and its choice for a problem.

A token's key is its latent vector and a rotary part, [512 | 64], and its value is the latent vector again, so the
kernel loads each latent once for both products. With such wide tiles, shared memory and registers are the limits:

      shared memory   queries 64 × 576: 72 KiB; four slots of half a tile's latents, 64 × 256: 128 KiB; two of rotary
                      parts, 64 × 64: 16 KiB; 216 of 227 KiB
      registers       O [64, 512] fp32 does not fit in one warpgroup: two hold 256 columns each, 128 registers a
                      thread, and get P from a third one through shared memory

Two tiles are in use at a time. Each half of a tile is released as soon as the warpgroup that has its columns has
multiplied it. TMA and wgmma need powers of two, so a tile is two blocks of 256 columns and one of 64. Latents of 8
bits arrive in the same slots, where they are converted (eight_bit.py).

Up to 16 query rows may be the right operands instead (swap-AB), so that nothing is padded to 64 rows:

      shared memory   queries 16 × 576: 18 KiB; P 16 × 64; five slots of half a tile's latents, 64 × 256: 160 KiB;
                      three of rotary parts, 64 × 64: 24 KiB; so 96 KiB are in flight while a tile is read
      registers       Oᵀ [512, 16] fp32: 64 a thread of one warpgroup

This file imports no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import ClassVar

from warpattn.kernels.nvidia.latent_sizes import LatentSizes
from warpattn.kernels.topology import Edge, Registers, Role, Signal, Topology
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.backends import LATENT
from warpattn.problem.element import FP16, Element
from warpattn.problem.launch import DEFAULT_OPTIONS, Choice, PlanOptions

from ..decode.choice import (
    alone_on_sms,
    check_takes,
    describe,
    explain,
    head_tiles,
    invariant,
    partitions,
    queues_of,
    schedule_of,
    undivided,
)
from ..decode.config import REGISTERS as DECODE_REGISTERS
from ..decode.config import Combine, Overlap, StreamConfig
from ..operand_format import OperandFormat
from ..prefill.config import CONSUMER_ROWS


@dataclass(frozen=True)
class RoleRegisters:
    """Registers a thread of the roles with 64 query rows; 2 * values + scores + load = 512."""

    values: int
    scores: int
    load: int


BLOCK_N = 64  # keys of a tile
STAGES = 4  # slots of half a tile's latents
HALVES = 2  # warpgroups that share the output's columns
REGISTERS = RoleRegisters(values=168, scores=120, load=56)
CONVERTING = RoleRegisters(values=160, scores=104, load=88)  # where the loading role converts 8-bit latents
SWAP_AB_KEYS = 64  # keys of a warpgroup's tile with swap-AB: the rows of a wgmma
SWAP_AB_STAGES = 5
NARROW_WARPGROUPS = 2  # with 8-bit latents and swap-AB: each has 64 keys of a tile and half of the output's columns
NARROW_STAGES = 4  # 128 KiB of slots, 160 with rotary parts
BOTH = Registers(consumer=216, producer=72)  # 2 * 216 + 72 = 504, what 12 warps have at launch
SCALED = 128  # columns of 8-bit latents that may share a scale
SWAP_AB_ROWS = 16  # up to so many query rows of a sequence swap-AB is chosen: the rows of one tile
GATHERING = 232  # registers a thread of a producer that holds the addresses of gathered rows
ONCE = "latents are read once, as keys and as values; two warpgroups share the output, whose weights a third one makes"
ON_THE_LEFT = "latents are read once, as keys and as values, on the left of the products with 16 columns for queries"


@dataclass(frozen=True)
class MlaConfig(LatentSizes, StreamConfig):
    """Tiles and resources of one compiled kernel; `choose_tiles` fills in what does not vary. `stages`: slots of half a
    tile's latents."""

    latents: Element | None = None  # element of 8-bit latents, which the loading role converts, see eight_bit.py
    own_rope: bool = False  # whether the queries' rotary columns are in a tensor of their own
    narrow_rope: bool = False  # whether the keys' rotary parts have 8 bits, too
    recomputes: bool = False  # whether rows with NaN from a hidden latent are computed again, see recompute.py
    hides_in_loop: ClassVar[bool] = False  # whether the key loop itself removes hidden NaN and infinite latents
    ctas: ClassVar[int] = 1  # CTAs an SM
    scale_bytes: ClassVar[int] = 0  # bytes of scales of a tile in the ring
    overlap: ClassVar[Overlap] = Overlap()
    swap_ab: ClassVar[bool] = False  # whether latents are the left operands of the products
    why: ClassVar[str] = ONCE
    tiles_outermost: ClassVar[bool] = True
    rows: ClassVar[int] = CONSUMER_ROWS  # rows of a query tile

    padded_qk = property(attrgetter("dim_qk"))
    padded_v = property(attrgetter("dim_v"))

    @property
    def rope_stages(self) -> int:
        """Slots of rotary parts: one for each tile that has latents in the ring."""
        return -(-self.stages // 2)

    @property
    def latent_element(self) -> Element:
        """Element of latents in the ring."""
        return self.element

    @property
    def rope_element(self) -> Element:
        """Element of rotary parts in the ring."""
        return self.element

    rope_column = property(lambda self: self.dim_v if self.latents is None else 0)  # first column of rotary parts
    rope_bytes = property(lambda self: self.rope_element.bytes * self.block_n * self.rope)
    half_bytes = property(lambda self: self.latent_element.bytes * self.block_n * self.half)

    @property
    def clears(self) -> bool:
        """Whether the producer zeroes latents past the end of a sequence. The converting role does it in registers,
        and gathered rows repeat the last one."""
        return self.schedule.has_lengths and self.latents is None and not self.gathers

    @property
    def words(self) -> str:
        """Tile and rings in words, for a plan."""
        rings = f"rings rotary {self.rope_stages} halves of latents {self.stages}"
        return f"tile {self.rows} x {self.block_n}, 2 x {self.half} output columns, {rings}"

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and signals. A half of latents is released by the role that has its columns, which reads it
        last. A rotary part is released by both of these roles, which read P in its place; so are the factors."""
        values = tuple(f"values {half}" for half in range(HALVES))
        registers = REGISTERS if self.latents is None else CONVERTING
        roles = [Role(name, 4, registers.values) for name in values]
        roles += [Role("scores", 4, registers.scores)]
        rings = (
            Edge("K", "load", values, self.rope_stages, self.rope_bytes),
            Edge("V", "load", values[:1], self.stages, self.half_bytes),
            Edge("P", "scores", values, self.rope_stages, self.lane_bytes),
            Edge("sums", "scores", values, 1, 2 * self.lane_bytes),
        )
        if self.latents is None:
            warps, arrived = 1, Signal("tile to clear", (("load",),), by_warp=False)
        else:
            parts = self.stages + (self.rope_stages if self.narrow_rope else 0)
            warps, arrived = 4, Signal("8-bit parts of tiles", (("load",),) * parts, by_warp=False)
        load = Role("load", warps, registers.load)
        return Topology((*roles, load), rings, self.private_bytes, (arrived,))

    lane_bytes = property(lambda self: 4 * 4 * self.rows)  # bytes of four fp32 numbers a row

    @property
    def private_bytes(self) -> int:
        """Bytes beside the rings: queries."""
        return self.element.bytes * self.rows * self.dim_qk

    @property
    def smem_bytes(self) -> int:
        """Bytes of tiles and barriers; the compiler adds `decode.choice.SLACK` at most."""
        return self.topology.smem_bytes


@dataclass(frozen=True)
class SwapAbMlaConfig(MlaConfig):
    """Tiles and resources of one compiled kernel with swap-AB."""

    clears: ClassVar[bool] = False  # the consumer removes hidden values itself
    warpgroups: int = 1  # consumer warpgroups, each with 64 keys of a tile
    swap_ab: ClassVar[bool] = True
    why: ClassVar[str] = ON_THE_LEFT
    rows: ClassVar[int] = 16

    @property
    def latent_element(self) -> Element:
        """Element of latents in the ring."""
        return self.latents or self.element

    @property
    def rope_element(self) -> Element:
        """Element of rotary parts in the ring."""
        return self.latent_element if self.narrow_rope else self.element

    @property
    def operand(self) -> Element:
        """Element of wgmma operands with latents; 8-bit latents become fp16."""
        return self.element if self.latents is None else FP16

    attending_warps = property(lambda self: 4 * self.warpgroups)
    query_columns = property(lambda self: self.half if self.latents is None else self.dim_v)  # columns of a Q tile
    weights = property(lambda self: 1 if self.latents is None else self.dim_v // SCALED)  # number of P tiles
    scale_bytes = property(lambda self: 0 if self.latents is None else 4 * self.weights * self.block_n)  # of a tile

    hides_in_loop = property(lambda self: self.latents is None)

    @cached_property
    def topology(self) -> Topology:
        registers = DECODE_REGISTERS if self.warpgroups == 1 else BOTH
        load = Role("load", 1, GATHERING if self.gathers else registers.producer)
        rings = (
            Edge("K", load.name, ("attend",), self.rope_stages, self.rope_bytes),
            Edge("V", load.name, ("attend",), self.stages, self.half_bytes),
        )
        return Topology((Role("attend", self.attending_warps, registers.consumer), load), rings, self.private_bytes)

    @property
    def private_bytes(self) -> int:
        """Bytes beside the rings: queries, P, scales of tiles in the ring, and with 16-bit latents a
        quarter of the output in fp32 for its transposition."""
        own = self.operand.bytes * self.rows * (self.dim_qk + self.weights * self.block_n)
        turned = 4 * self.rows * self.dim_v // 4 if self.latents is None else 0
        return own + turned + self.rope_stages * self.scale_bytes

    @property
    def words(self) -> str:
        rings = f"rings rotary {self.rope_stages} halves of latents {self.stages}"
        return f"tile {self.rows} x {self.block_n}, {rings}"


def choose_tiles(element: Element, page_size: int = 0) -> MlaConfig:
    """The configuration for `page_size` keys a page (0: not paged). A head has at least 16 rows of 512 columns, too
    many for one CTA to combine, so a separate kernel does."""
    box = min(page_size & -page_size, BLOCK_N) or None
    return MlaConfig(OperandFormat(element, *LATENT), BLOCK_N, STAGES, box, combine=Combine(separate_kernel=True))


def tiles_of(problem: Problem) -> MlaConfig:
    """The configuration without swap-AB, for any number of query rows."""
    config = choose_tiles(problem.element, problem.page_size)
    if problem.rope:
        config = replace(config, latents=problem.kv_element, narrow_rope=problem.narrow_rope)
    return config


def swap_ab_tiles(problem: Problem, grid: int) -> SwapAbMlaConfig:
    """The configuration with swap-AB, for `grid` CTAs. With as many heads as CTAs few heads are split, and the last CTA
    of a head combines its parts; a separate kernel would take 7 µs to find none."""
    groups = NARROW_WARPGROUPS if problem.rope else 1
    keys = groups * SWAP_AB_KEYS
    box = min(problem.page_size & -problem.page_size, keys) or None
    combine = Combine(short_parts=0, separate_kernel=head_tiles(problem) < grid)
    operands = OperandFormat(problem.element, *LATENT)
    config = SwapAbMlaConfig(operands, keys, SWAP_AB_STAGES, box, combine=combine, warpgroups=groups)
    if problem.rope:
        config = replace(config, latents=problem.kv_element, narrow_rope=problem.narrow_rope)
        config = replace(config, stages=NARROW_STAGES)
    return config


def takes_swap_ab(problem: Problem) -> bool:
    """Whether the kernel with swap-AB can run a latent problem: the query rows of a sequence fit one tile."""
    return problem.seq_q * problem.heads_q <= SwapAbMlaConfig.rows


def choose(
    problem: Problem, target: Arch, *, options: PlanOptions = DEFAULT_OPTIONS, swap_ab: bool | None = None
) -> Choice:
    """Chooses the configuration of a latent problem that decode takes. `swap_ab`: whether to use swap-AB; None: for up
    to `SWAP_AB_ROWS` query rows."""
    check_takes(problem)
    in_any_step = options.batch_invariant and problem.ragged_queries
    if swap_ab is None:  # batch-invariant steps of a sequence may differ in rows, but must not in their kernel
        swap_ab = not in_any_step and problem.seq_q * problem.heads_q <= SWAP_AB_ROWS
    if swap_ab and not takes_swap_ab(problem):
        raise ValueError(f"swap-AB takes up to {SwapAbMlaConfig.rows} rows of queries")
    grid = alone_on_sms(target)
    config = swap_ab_tiles(problem, grid) if swap_ab else tiles_of(problem)
    config = replace(config, own_rope=problem.q_rope > 0)
    if options.batch_invariant:
        config = replace(config, schedule=undivided(config) if in_any_step else invariant(config))
    config = replace(config, schedule=schedule_of(problem, config.schedule, grid))
    lines, queues = partial(describe, config, problem, grid), queues_of(problem, grid)
    reasons = (*explain(config, target, grid, queues), config.why)
    return Choice("mla", config, (grid,), lines, reasons, partitions=partitions(problem, config, grid))
