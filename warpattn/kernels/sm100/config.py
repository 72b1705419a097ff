"""FA4Config: tiles, rings, tensor memory and shared memory of the Blackwell prefill kernels, as one value.

`BM` is the knob. 256 rows are two query tiles (2Q, the flagship), 128 are one (1Q: short prompts and split-KV), 64 and
32 are packed into the 128 lanes of tensor memory. Everything else follows from it, the head dims, the page size and
whether two CTAs work as a pair:

      tensor memory, 512 columns     S0 │ S1 │ O0 │ O1        P0, P1 over S0, S1
      shared memory                  Q │ K ring, V ring  or  one ring of both │ scales │ barriers

Slots that are left over decide about the rings: an odd number is one ring that K and V tiles take in turn, an even
number is a ring each, and then K arrives in chunks of columns so that the first product starts early.

Nothing here imports Triton. `gluon()` is the step from this shape to one that Gluon can express (powers of two).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from typing import Any

from warpattn.kernels.topology import BARRIER_BYTES, Edge, Role, Signal, Topology
from warpattn.problem.arch import compile_options
from warpattn.problem.element import FP8, FP32, Element
from warpattn.problem.scales import EightBit

from .rounding import align_down, align_up, power_below

SMEM_LIMIT = 232_448  # 228 KiB of an SM less the 1 KiB the system keeps
ADDED = 512  # bytes that the compiler may add beside 8-bit tiles, whose rings leave little
TMEM_COLUMNS = 512
NUM_PV_STAGES = 2  # parts in which P is handed over: the tensor core starts on the first while the second is written
SCALE_BYTES = 4 * 256  # a row's scale from each softmax thread to the correction role
SPLITK_PARTITIONS = (1, 2, 4, 6, 8, 10, 16)
# The first role gets the registers that the others leave.
ROLES = (
    Role("correction", 4, 88),
    Role("softmax 0", 4, 192),
    Role("softmax 1", 4, 192),
    Role("mma", 1, 40),
    Role("load", 1, 40),
)
CONVERT = Role("convert", 2, 40)  # in the warpgroup of the two before it
STAGED = 2  # 8-bit tiles in shared memory


@dataclass(frozen=True)
class FA4Config:
    """Shape of one compiled Blackwell kernel. Lengths are in elements unless said."""

    element: Element  # of queries and of keys in products: BF16 | FP16 | FP8 | e5m2
    qk_depth: int
    ov_depth: int
    group: int = 1  # query heads per key head
    BM: int = 256  # query rows of a CTA: 256, 128, 64, 32
    page_size: int = 0  # 0: keys are contiguous
    pair_cta: bool = False  # two CTAs share K rows and V columns
    splitk_partitions: int = 1
    max_bn: int = 256  # upper bound of BN
    max_qk_stages: int | None = None  # upper bound of the chunks of K
    eight_bit: EightBit | None = None  # k and v in memory, and perhaps q; None: as `element`
    out_element: Element | None = None  # None: as `element`

    @property
    def MMA_K(self) -> int:
        """Contraction of one tensor-core instruction."""
        return 32 // self.element.bytes

    @property
    def products(self) -> bool:
        """Whether operands of products have 8 bits: queries, keys, weights and values."""
        return self.element.bytes == 1

    @property
    def weights(self) -> Element:
        """Element of P: e4m3 with 8-bit operands, even if these are e5m2, which has one significant bit less."""
        return FP8 if self.products else self.element

    @property
    def converts(self) -> bool:
        """Whether two warps convert 8-bit tiles to 16 bits (prefill_2q/convert.py)."""
        return self.eight_bit is not None and not self.products

    def scale_blocks(self, operand: str) -> int:
        """Scales of a token that its row of "k" or "v" is multiplied by, one for each block of columns; 0 without."""
        scaled = self.converts and self.eight_bit is not None and self.eight_bit.of_token(operand)
        return self.eight_bit.blocks(operand, self.qk_depth if operand == "k" else self.ov_depth) if scaled else 0

    @property
    def row_scales(self) -> bool:
        """Whether rows of a tile have softmax scales of their own: those of their query heads, or of their tokens."""
        bits = self.eight_bit
        return bits is not None and (bits.rows("q") > 0 or (bits.scales.q == "head" and self.fuse_gqa))

    @property
    def swizzle_bytes(self) -> int:
        return 64 if self.products else 128

    @property
    def swizzle_elements(self) -> int:
        return self.swizzle_bytes // self.element.bytes

    @property
    def padded_qk_depth(self) -> int:
        return align_up(self.qk_depth, self.swizzle_elements)

    @property
    def padded_ov_depth(self) -> int:
        return align_up(self.ov_depth, self.swizzle_elements)

    @property
    def num_q(self) -> int:
        """Query tiles of a CTA."""
        return 2 if self.BM == 256 else 1

    @property
    def cta_group(self) -> int:
        return 2 if self.pair_cta else 1

    @property
    def MMA_M(self) -> int:
        """Rows of one tensor-core product, over both CTAs of a pair."""
        return min(self.BM, 128) * self.cta_group

    @property
    def m_pack(self) -> int:
        """Groups of rows that share the columns of tensor memory."""
        return max(1, 128 // self.BM)

    @property
    def use_ws(self) -> bool:
        return not self.pair_cta and self.MMA_M <= 64

    @property
    def fuse_gqa(self) -> bool:
        """Whether the query heads of a key head are rows of one tile: row r is query r // group of head r % group."""
        return self.group > 1 and self.MMA_M % self.group == 0

    @property
    def BM_eff(self) -> int:
        """Query positions of a CTA's tile."""
        return self.BM // self.group if self.fuse_gqa else self.BM

    @property
    def PairBM_eff(self) -> int:
        """Query positions of a cluster's tile; what masks are asked about."""
        return self.BM_eff * self.cta_group

    @property
    def tile_heads(self) -> int:
        """Query heads of a tile's rows."""
        return self.group if self.fuse_gqa else 1

    @property
    def wg_queries(self) -> int:
        """Query positions from softmax warpgroup 0 to 1; with one query tile they have the same rows."""
        return self.PairBM_eff // 2 if self.num_q == 2 else 0

    @property
    def BM_q(self) -> int:
        """Rows of one query tile in a CTA."""
        return self.BM // self.num_q

    @cached_property
    def BN(self) -> int:
        """Keys of a tile, as many as fit beside O; a page divides it or it divides one, but for products of 8 bits."""
        most = self.m_pack * (TMEM_COLUMNS // 2 - max(self.padded_qk_depth, self.padded_ov_depth))
        bn = max(0, min(self.max_bn, align_down(most, self.MMA_K)))
        divides = self.page_size == 0 or bn == 0 or self.page_size % bn == 0 or bn % self.page_size == 0
        return bn if divides or self.element.bytes == 1 else power_below(bn - 1)  # theirs take 32 keys, a quarter

    @property
    def box_rows(self) -> int:
        """Keys of one box: the largest power of two that divides both a tile and a page."""
        return min(self.page_size & -self.page_size, self.BN) if self.page_size else self.BN

    @property
    def s_columns(self) -> int:
        return self.BN // self.m_pack

    @property
    def tmem_used(self) -> int:
        """Columns of tensor memory: S and O of each query tile."""
        return 2 * (self.s_columns + self.padded_ov_depth)

    @cached_property
    def chunks(self) -> int:
        """Chunks of columns that Q and K can arrive in, before the rings are known."""
        chunks = gcd(self.padded_qk_depth // self.swizzle_elements, self.padded_qk_depth // self.MMA_K)
        return chunks if self.max_qk_stages is None else gcd(chunks, self.max_qk_stages)

    @property
    def q_bytes(self) -> int:
        """Bytes of one query tile of a CTA."""
        return self.BM_q * self.padded_qk_depth * self.element.bytes

    @cached_property
    def smem_base(self) -> int:
        """Shared memory of everything but the K/V rings: the address of tensor memory, barriers, Q, and a scale for
        every softmax thread."""
        barriers = 8 + 2 * NUM_PV_STAGES + (self.chunks if self.num_q == 2 else 0)
        staged = STAGED * (self.staged_slot + 2 * BARRIER_BYTES) if self.converts else 0
        scales = SCALE_BYTES + 4 * self.BN * (self.scale_blocks("k") + self.scale_blocks("v"))
        return 4 + BARRIER_BYTES * barriers + self.num_q * self.q_bytes + scales + staged

    @property
    def staged_slot(self) -> int:
        """Bytes of a tile of 8 bits in shared memory."""
        return self.BN * max(self.padded_qk_depth, self.padded_ov_depth)

    @property
    def slot_bytes(self) -> int:
        """A slot of a ring with its full and empty barrier."""
        columns = max(self.padded_qk_depth, self.padded_ov_depth)
        if self.use_ws:
            columns //= self.chunks
        return self.BN * columns * self.element.bytes // self.cta_group + 2 * BARRIER_BYTES

    @cached_property
    def kv_slots(self) -> int:
        """Slots that fit beside `smem_base`."""
        return (SMEM_LIMIT - ADDED * self.converts - self.smem_base) // self.slot_bytes if self.BN > 0 else 0

    @cached_property
    def use_shared_kv(self) -> bool:
        """One ring for K and V, rather than one each."""
        return self.use_ws or self.kv_slots % 2 == 1

    @cached_property
    def num_kv_stages(self) -> int:
        """Slots of the shared ring, or of each of the two."""
        return self.kv_slots if self.use_shared_kv else self.kv_slots // 2

    @cached_property
    def num_qk_stages(self) -> int:
        """Chunks of columns of a K tile, each with its own barriers."""
        if self.use_ws:
            return self.chunks
        if self.use_shared_kv:
            return 1
        used = self.smem_base + self.kv_slots * self.slot_bytes + self._chunk_barriers(self.chunks)
        return self.chunks if used + ADDED * self.converts <= SMEM_LIMIT else 1

    def _chunk_barriers(self, chunks: int) -> int:
        """Bytes of the barriers that chunks add to the K ring."""
        return 0 if self.use_shared_kv else (chunks - 1) * self.num_kv_stages * 2 * BARRIER_BYTES

    @property
    def p_columns(self) -> tuple[int, int, int]:
        """Columns of the parts in which a row of P is computed. The first two are handed over together, three quarters
        of the keys, so that the tensor core works on them while the last is computed."""
        return self.BN // 2, self.BN // 4, self.BN // 4

    @property
    def smem_used(self) -> int:
        """Bytes of shared memory."""
        return self.smem_base + self.kv_slots * self.slot_bytes + self._chunk_barriers(self.num_qk_stages)

    @property
    def BK0(self) -> int:
        """Columns of a chunk of Q and K."""
        return self.padded_qk_depth // self.num_qk_stages

    @property
    def k_rows_per_cta(self) -> int:
        return self.BN // self.cta_group

    @property
    def v_cols_per_cta(self) -> int:
        return self.padded_ov_depth // self.cta_group

    @property
    def k_chunk_bytes(self) -> int:
        """Bytes of a chunk of K in a CTA."""
        return self.k_rows_per_cta * self.BK0 * self.element.bytes

    @property
    def v_bytes(self) -> int:
        """Bytes of a V tile in a CTA."""
        return self.BN * self.v_cols_per_cta * self.element.bytes

    @property
    def stored(self) -> Element:
        """Element of K and V in memory."""
        return self.element if self.eight_bit is None else self.eight_bit.element

    @property
    def written(self) -> Element:
        """Element of the output; fp32 for partial outputs."""
        return FP32 if self.splitk_partitions > 1 else self.out_element or self.element

    @property
    def store_columns(self) -> int:
        """Columns of a block of the output, a swizzle atom: blocks pass through the shared memory of the queries."""
        return self.swizzle_bytes // self.written.bytes

    @property
    def out_slots(self) -> int:
        """Blocks of the output that the shared memory of a query tile holds."""
        return self.padded_qk_depth // self.swizzle_elements

    @property
    def k_load_bytes(self) -> int:
        """Bytes of a chunk of K in a CTA, as TMA brings them."""
        return self.k_chunk_bytes * self.stored.bytes // self.element.bytes

    @property
    def v_load_bytes(self) -> int:
        """Bytes of a V tile, as TMA brings them."""
        return self.v_bytes * self.stored.bytes // self.element.bytes

    @property
    def options(self) -> dict[str, Any]:
        """Options of triton.compile."""
        return compile_options(num_ctas=2) if self.pair_cta else compile_options()

    @cached_property
    def topology(self) -> Topology:
        """Roles, rings and signals of a CTA."""
        roles = (*ROLES, CONVERT) if self.converts else ROLES
        return Topology(roles, self._rings, self.num_q * self.q_bytes + SCALE_BYTES, self._signals)

    @property
    def _rings(self) -> tuple[Edge, ...]:
        if not self.converts:
            return self._operand_rings("load")
        return (Edge("bytes", "load", ("convert",), STAGED, self.staged_slot), *self._operand_rings("convert"))

    def _operand_rings(self, producer: str) -> tuple[Edge, ...]:
        if self.use_shared_kv:
            slot = max(self.k_chunk_bytes, self.v_bytes)
            return (Edge("KV", producer, ("mma",), self.num_kv_stages, slot),)
        k = Edge("K", producer, ("mma",), self.num_kv_stages * self.num_qk_stages, self.k_chunk_bytes)
        return k, Edge("V", producer, ("mma",), self.num_kv_stages, self.v_bytes)

    @property
    def _signals(self) -> tuple[Signal, ...]:
        """The barriers' meaning is in prefill_2q/context.py. A pair's warpgroups arrive as a whole."""
        by_warp = not self.pair_cta
        both = (("softmax 0",), ("softmax 1",))
        p = tuple(producers for (wg,) in both for producers in ((wg, "correction"), (wg,)))
        own = Signal("Q1_sync", (("load",),)) if self.num_q == 2 else Signal("combine", both, by_warp)
        return (
            Signal("S_consumer", p, by_warp),
            Signal("C_producer", both, by_warp),
            Signal("C_consumer", (("correction",),) * 2, by_warp),
            Signal("S_producer", (("mma",),) * 2),
            Signal("O_producer", (("mma",),) * 2),
            own,
        )

    def supported(self) -> tuple[str, ...]:
        """Why this shape is impossible, one sentence each; () if it is not."""
        rules = (*self._tile_rules(), *self._mode_rules())
        return tuple(sentence for holds, sentence in rules if not holds)

    def _tile_rules(self) -> tuple[tuple[bool, str], ...]:
        stages = 4 if self.use_ws else 2
        page, bn = self.page_size, self.BN
        return (
            (self.BM in (32, 64, 128, 256), f"BM is {self.BM}; it is 32, 64, 128 or 256"),
            (bn >= 64, f"BN is {bn}; at least 64 keys a tile have to fit beside the accumulators in tensor memory"),
            (self.num_kv_stages >= stages, f"{self.num_kv_stages} stages fit in shared memory; at least {stages}"),
            (self.tmem_used <= TMEM_COLUMNS, f"{self.tmem_used} columns of tensor memory; there are {TMEM_COLUMNS}"),
            (self.smem_used <= SMEM_LIMIT, f"{self.smem_used} bytes of shared memory; there are {SMEM_LIMIT}"),
            (
                not 0 < page < bn or page % self.MMA_K == 0,
                f"page_size is {page}; below BN {bn} it is a multiple of {self.MMA_K}",
            ),
        )

    def _mode_rules(self) -> tuple[tuple[bool, str], ...]:
        depth = max(self.qk_depth, self.ov_depth)
        one = self.num_q == 1
        return (
            (one or depth >= 64, f"head dim is {depth}; at least 64"),
            (not one or 64 <= depth <= 256, f"head dim is {depth}; one query tile takes 64 to 256"),
            (not (one and self.pair_cta), f"BM is {self.BM}; a pair of CTAs needs two query tiles each (BM 256)"),
            (
                self.splitk_partitions in (SPLITK_PARTITIONS if one else (1,)),
                f"splitk_partitions is {self.splitk_partitions}; one query tile takes {SPLITK_PARTITIONS}, two take 1",
            ),
            (not self.pair_cta or 64 < depth <= 128, f"head dim is {depth}; a pair of CTAs takes 65 to 128"),
        )

    def one_query_twin(self) -> FA4Config:
        """The same problem with one query tile and as many chunks of Q and K."""
        return replace(self, BM=128, max_qk_stages=self.num_qk_stages)

    def can_switch_to_1q(self) -> bool:
        """Whether one kernel can hold both bodies, with two query tiles and with one."""
        return self.num_q == 2 and not self.pair_cta and not self.one_query_twin().supported()

    def gluon(self) -> tuple[FA4Config, tuple[str, ...]]:
        """This shape with tiles that Gluon can express, and one sentence for each thing that had to change."""
        if self.BN == power_below(self.BN):
            return self, ()
        config = replace(self, max_bn=power_below(self.BN))
        return config, (f"BN is {config.BN}, not {self.BN}: Gluon's tiles are powers of two",)
