"""FA4Config against figures computed by hand, its rules, and what Gluon makes of it."""

from dataclasses import dataclass

import pytest

from warpattn.kernels.sm100.config import SMEM_LIMIT, TMEM_COLUMNS, FA4Config
from warpattn.kernels.sm100.rounding import align_down, align_up, power_below
from warpattn.problem.element import BF16, FP8, FP16, FP32, Element


def config(depth: int, element: Element = BF16, **more) -> FA4Config:
    return FA4Config(element, depth, depth, **more)


# BN, one ring for both, stages of each ring, chunks of K, columns of a chunk, columns of tensor memory, bytes
TABLE = [
    (config(64), 192, False, 4, 1, 64, 512, 230_636),
    (config(64, page_size=128), 128, False, 6, 1, 64, 384, 230_700),
    *((config(d), 128, True, 5, 1, 128, 512, 230_596) for d in (72, 80, 96, 128)),
    (config(128, BM=128), 128, False, 3, 2, 64, 512, 230_644),
    *((config(d, pair_cta=True), 128, False, 5, 2, 64, 512, 230_756) for d in (80, 96, 128)),
    (config(64, FP8), 192, True, 17, 1, 64, 512, 226_684),
    (config(128, FP8), 128, False, 6, 2, 64, 512, 230_804),
    (config(128, BM=32), 256, True, 6, 2, 64, 384, 206_020),
    (config(128, BM=64), 256, True, 6, 2, 64, 512, 214_212),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0].element.name}-d{row[0].qk_depth}-BM{row[0].BM}")
def test_the_computed_table(row) -> None:
    c, bn, shared, stages, chunks, bk0, tmem, smem = row
    assert (c.BN, c.use_shared_kv, c.num_kv_stages, c.num_qk_stages) == (bn, shared, stages, chunks)
    assert (c.BK0, c.tmem_used, c.smem_used) == (bk0, tmem, smem)
    assert c.supported() == ()


@dataclass(frozen=True)
class Oldest:
    """The shape of the system's first generation: one ring whatever is left over, 256 rows, scales of 256 floats."""

    BN: int
    stages: int
    smem: int
    tmem: int


def oldest(depth: int, page_size: int = 0) -> Oldest:
    """Its formulas for two-byte operands and head dims up to 128."""
    padded = align_up(depth, 64)
    bn = min(256, align_down(256 - padded, 16))
    if page_size % bn:
        bn = power_below(bn - 1)
    fixed, slot = 4 + (11 + 4) * 8 + 256 * padded * 2 + 256 * 4, bn * padded * 2 + 16
    stages = (SMEM_LIMIT - fixed) // slot
    return Oldest(bn, stages, fixed + stages * slot, 2 * bn + 2 * padded)


def test_the_oldest_formula() -> None:
    assert (oldest(64).BN, oldest(64).stages) == (192, 8)
    for page_size in (128, 256, 512):
        assert (oldest(64, page_size).BN, oldest(64, page_size).stages) == (128, 12)
    for depth in (72, 80, 96, 128):
        assert oldest(depth) == Oldest(128, 5, 230_604, 512)


@pytest.mark.parametrize(("depth", "page_size"), [(64, 0), (64, 128), (64, 256), (128, 0), (128, 256)])
def test_both_generations_choose_the_same_slots(depth: int, page_size: int) -> None:
    new, old = config(depth, page_size=page_size), oldest(depth, page_size)
    assert (new.BN, new.kv_slots) == (old.BN, old.stages)


def test_barriers_of_the_flagship() -> None:
    """Their number by hand; threads arrive by warps."""
    topology = config(128).topology
    assert topology.barriers == 23 and [edge.barriers for edge in topology.edges] == [10]
    assert [topology.arrivals("S_consumer", i) for i in range(4)] == [8, 4, 8, 4], "part 0: softmax and correction"
    assert [topology.arrivals(name) for name in ("C_producer", "C_consumer")] == [4, 4]
    assert [topology.arrivals(name) for name in ("Q1_sync", "S_producer", "O_producer")] == [1, 1, 1]


def test_warpgroups_of_a_pair_arrive_as_a_whole() -> None:
    topology = config(128, pair_cta=True).topology
    assert [topology.arrivals("S_consumer", i) for i in range(4)] == [2, 1, 2, 1]
    assert [topology.arrivals(name) for name in ("C_producer", "C_consumer", "S_producer")] == [1, 1, 1]


def test_one_query_tile_has_barriers_for_the_combination() -> None:
    one, two = config(128, BM=128).topology, config(128).topology
    names = [{signal.name for signal in topology.signals} for topology in (one, two)]
    assert names[0] ^ names[1] == {"combine", "Q1_sync"}
    assert (one.signal("combine").number, one.arrivals("combine")) == (2, 4)


@pytest.mark.parametrize("c", [row[0] for row in TABLE if not row[0].use_ws])
def test_the_topology_takes_the_memory_that_the_config_counts(c) -> None:
    """The config counts a barrier for each chunk of Q1, which has one, and none for the combination."""
    barriers = 2 if c.num_q == 1 else 1 - c.chunks
    assert c.topology.smem_bytes == c.smem_used - 4 + 8 * barriers, "4 bytes: the address of tensor memory"


def test_roles_have_all_threads_and_registers() -> None:
    topology = config(128).topology
    assert (topology.threads, topology.registers) == (512, 65_536)


def test_grouped_heads_are_rows_of_the_tile() -> None:
    assert not config(128, group=1).fuse_gqa and config(128, group=1).BM_eff == 256
    fused = config(128, group=4)
    assert fused.fuse_gqa and fused.BM_eff == 64
    assert not config(128, group=6).fuse_gqa and config(128, group=6).BM_eff == 256
    pair = config(128, group=8, pair_cta=True)
    assert (pair.MMA_M, pair.BM_eff, pair.PairBM_eff) == (256, 32, 64)


@pytest.mark.parametrize(
    ("depth", "page_size", "bn", "box"),
    [
        (128, 16, 128, 16),
        (128, 128, 128, 128),
        (128, 1024, 128, 128),
        (128, 48, 64, 16),
        (64, 64, 192, 64),
        (64, 256, 128, 128),
    ],
)
def test_pages_and_tiles_divide_one_another(depth, page_size, bn, box) -> None:
    paged = config(depth, page_size=page_size)
    assert (paged.BN, paged.box_rows) == (bn, box)
    assert (page_size % box, bn % box) == (0, 0)


def test_a_pair_splits_rows_of_k_and_columns_of_v() -> None:
    pair = config(128, pair_cta=True)
    assert (pair.cta_group, pair.MMA_M, pair.k_rows_per_cta, pair.v_cols_per_cta) == (2, 256, 64, 64)
    assert pair.k_chunk_bytes == 64 * 64 * 2 and pair.v_bytes == 128 * 64 * 2
    alone = config(128)
    assert (alone.cta_group, alone.MMA_M, alone.k_rows_per_cta, alone.v_cols_per_cta) == (1, 128, 128, 128)
    assert alone.k_chunk_bytes == alone.v_bytes == 32_768


def test_p_is_handed_over_in_three_quarters_and_one() -> None:
    assert config(128).p_columns == (64, 32, 32)


UNSUPPORTED = [
    (config(128, BM=96), "BM is 96"),
    (config(256), "BN is 0"),
    (config(256, BM=128), "BN is 0"),
    (config(32), "head dim is 32; at least 64"),
    (config(32, BM=128), "head dim is 32; one query tile takes 64 to 256"),
    (config(128, BM=128, pair_cta=True), "a pair of CTAs needs two query tiles"),
    (config(64, pair_cta=True), "head dim is 64; a pair of CTAs takes 65 to 128"),
    (config(128, splitk_partitions=2), "splitk_partitions is 2"),
    (config(128, BM=128, splitk_partitions=3), "splitk_partitions is 3"),
    (config(128, page_size=8), "page_size is 8; below BN 128 it is a multiple of 16"),
]


@pytest.mark.parametrize(("c", "reason"), UNSUPPORTED, ids=[reason for _, reason in UNSUPPORTED])
def test_what_is_not_supported_says_why(c: FA4Config, reason: str) -> None:
    assert any(reason in sentence for sentence in c.supported()), c.supported()


@pytest.mark.parametrize("partitions", [1, 2, 4, 6, 8, 10, 16])
def test_one_query_tile_may_be_split(partitions: int) -> None:
    assert config(128, BM=128, splitk_partitions=partitions).supported() == ()


def test_the_twin_with_one_query_tile() -> None:
    both = config(128)
    twin = both.one_query_twin()
    assert both.can_switch_to_1q()
    assert (twin.BM, twin.num_q, twin.num_qk_stages, twin.num_kv_stages) == (128, 1, both.num_qk_stages, 3)
    assert not config(128, pair_cta=True).can_switch_to_1q()
    assert not config(128, BM=128).can_switch_to_1q()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("depth", range(64, 129, 8))
@pytest.mark.parametrize("page_size", [0, 16, 64, 128, 256])
def test_gluon_gets_powers_of_two_that_fit(dtype: Element, depth: int, page_size: int) -> None:
    wanted = config(depth, dtype, page_size=page_size)
    c, reasons = wanted.gluon()
    assert c.supported() == ()
    for length in (c.BN, c.BK0, c.padded_qk_depth, c.padded_ov_depth, c.k_chunk_bytes, c.v_bytes):
        assert length == power_below(length)
    assert c.smem_used <= SMEM_LIMIT and c.tmem_used <= TMEM_COLUMNS
    assert (c == wanted) == (reasons == ())


@pytest.mark.parametrize("depth", range(64, 129, 16))
@pytest.mark.parametrize("BM", [128, 256])
def test_gluon_gets_8_bit_products(depth: int, BM: int) -> None:
    """At head dim 64 128 keys a tile, of 192 that would fit, and a ring each."""
    c, reasons = config(depth, FP8, BM=BM, out_element=BF16).gluon()
    assert c.supported() == () and c.products and not c.converts
    assert (c.BN, c.store_columns, c.swizzle_bytes) == (128, 32, 64)
    assert c.p_columns[2] % c.MMA_K == 0 and c.MMA_K == 32
    assert c.out_slots * c.store_columns * c.MMA_M * 2 == c.q_bytes
    if BM == 256:
        assert (c.num_kv_stages, c.num_qk_stages) == {64: (13, 1), 128: (6, 2)}[c.padded_qk_depth]
    assert bool(reasons) == (depth == 64)


def test_parts_of_8_bit_products_go_out_in_fp32() -> None:
    c = config(128, FP8, BM=128, out_element=BF16, splitk_partitions=4)
    assert (c.written, c.store_columns) == (FP32, 16)


def test_gluon_says_what_it_changed() -> None:
    c, reasons = config(64).gluon()
    assert reasons == ("BN is 128, not 192: Gluon's tiles are powers of two",)
    assert (c.BN, c.num_kv_stages, c.smem_used) == (128, 6, 230_700)
