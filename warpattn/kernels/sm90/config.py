"""SM90Config: the shape of the Hopper prefill kernel for one head dim, as a value.

Everything the kernel, the planner and the tests need to know about tiles, rings, registers and shared memory stands
here once; nothing in this file imports Triton.
"""

from dataclasses import dataclass
from functools import cached_property

from warpattn.kernels.topology import Edge, Role, Topology

CONSUMER_ROWS = 64  # rows of one warpgroup: M of wgmma
SMEM_LIMIT = 232_448  # 227 KiB a block can have on sm_90
TILE_BYTES = 12  # batch, head and first row of a tile


def pad_dim(dim: int) -> int:
    """Head dim rounded up to what TMA boxes, wgmma and register tensors can have: a power of two, at least 32."""
    return max(32, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class SM90Config:
    """Tile sizes and resources of one compiled kernel.

    `consumers` warpgroups of 64 query rows each share one stream of key tiles of `block_n` keys, kept in rings of
    `kv_stages` slots; `q_stages` query tiles are resident, so that with two the next tile's queries arrive while
    this tile is worked on. The output goes through shared memory `store_cols` columns at a time.
    """

    dtype: str  # "bf16" | "fp16"
    dim_qk: int
    dim_v: int
    consumers: int
    block_n: int
    kv_stages: int
    q_stages: int
    store_cols: int
    consumer_registers: int
    producer_registers: int
    take_turns: bool  # warpgroups issue to the tensor core in a fixed order

    @cached_property
    def padded_qk(self) -> int:
        return pad_dim(self.dim_qk)

    @cached_property
    def padded_v(self) -> int:
        return pad_dim(self.dim_v)

    @cached_property
    def rows(self) -> int:
        return CONSUMER_ROWS

    @cached_property
    def block_m(self) -> int:
        return CONSUMER_ROWS * self.consumers

    @cached_property
    def q_bytes(self) -> int:
        return 2 * self.block_m * self.padded_qk

    @cached_property
    def k_bytes(self) -> int:
        return 2 * self.block_n * self.padded_qk

    @cached_property
    def v_bytes(self) -> int:
        return 2 * self.block_n * self.padded_v

    @cached_property
    def out_bytes(self) -> int:
        return 2 * self.block_m * self.store_cols

    @cached_property
    def topology(self) -> Topology:
        """Roles and rings of a block. A Q slot also carries the place of its tile."""
        attend = tuple(f"attend {wg}" for wg in range(self.consumers))
        roles = [Role(name, 4, self.consumer_registers) for name in attend]
        edges = (
            Edge("Q", "load", attend, self.q_stages, self.q_bytes + TILE_BYTES),
            Edge("K", "load", attend, self.kv_stages, self.k_bytes),
            Edge("V", "load", attend, self.kv_stages, self.v_bytes),
        )
        return Topology((*roles, Role("load", 1, self.producer_registers)), edges, self.out_bytes)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of tiles and barriers (the compiler adds alignment and a few bytes of its own)."""
        return self.topology.smem_bytes


SHORT_ROWS = 2048  # measured at head dim 64: up to here 128-row tiles fit a causal triangle better than 192-row ones


def choose_config(dtype: str, dim_qk: int, dim_v: int, seq_q: int, masked: bool) -> tuple[SM90Config, str]:
    """The measured best configuration for a pair of head dims, and one sentence why (cycles: bench/notes.md).

    `masked`: the mask hides something, so that tiles differ in length.
    """
    qk, v = pad_dim(dim_qk), pad_dim(dim_v)
    wide = max(qk, v)
    if wide <= 64 and masked and seq_q <= SHORT_ROWS:
        why = f"head dim <= 64, a mask and at most {SHORT_ROWS} queries: 128-row tiles waste less of the diagonal"
        return SM90Config(dtype, dim_qk, dim_v, 2, 128, 4, 2, v, 240, 24, True), why
    if wide <= 64:
        why = "head dim <= 64: exponentials take as long as products, so three warpgroups hide them better"
        return SM90Config(dtype, dim_qk, dim_v, 3, 128, 2, 2, v, 160, 32, True), why
    if wide <= 128:
        why = "head dim <= 128: two warpgroups and 128 keys fill registers and shared memory with two query tiles"
        return SM90Config(dtype, dim_qk, dim_v, 2, 128, 2, 2, v, 240, 24, True), why
    why = "head dim > 128: 64 keys a tile, one query tile, output stored in column blocks, to fit shared memory"
    return SM90Config(dtype, dim_qk, dim_v, 2, 64, 2, 1, min(128, v), 240, 24, False), why
