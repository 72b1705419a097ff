"""FA4Config against the specification's computed figures (section 2), its rules, and what Gluon makes of it."""

from dataclasses import dataclass, replace

import pytest

from warpattn.kernels.sm100.config import SMEM_LIMIT, TMEM_COLUMNS, FA4Config, align_down, align_up, power_below


def config(depth: int, dtype: str = "bf16", **more) -> FA4Config:
    return FA4Config(dtype, depth, depth, **more)


# BN, one ring for both, stages of each ring, chunks of K, columns of a chunk, columns of tensor memory, bytes
TABLE = [
    (config(64), 192, False, 4, 1, 64, 512, 230_636),
    (config(64, page_size=128), 128, False, 6, 1, 64, 384, 230_700),
    *((config(d), 128, True, 5, 1, 128, 512, 230_596) for d in (72, 80, 96, 128)),
    (config(128, BM=128), 128, False, 3, 2, 64, 512, 230_644),
    *((config(d, pair_cta=True), 128, False, 5, 2, 64, 512, 230_756) for d in (80, 96, 128)),
    (config(64, "fp8"), 192, True, 17, 1, 64, 512, 226_684),
    (config(128, "fp8"), 128, False, 6, 2, 64, 512, 230_804),
    (config(128, BM=32), 256, True, 6, 2, 64, 384, 206_020),
    (config(128, BM=64), 256, True, 6, 2, 64, 512, 214_212),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0].dtype}-d{row[0].qk_depth}-BM{row[0].BM}")
def test_the_computed_table(row) -> None:
    c, bn, shared, stages, chunks, bk0, tmem, smem = row
    assert (c.BN, c.use_shared_kv, c.num_kv_stages, c.num_qk_stages) == (bn, shared, stages, chunks)
    assert (c.BK0, c.BK1, c.tmem_used, c.smem_used) == (bk0, bn, tmem, smem)
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
    flagship = config(128)
    assert flagship.barriers == 23 and flagship.kv_barriers == 10
    counts = {barriers.name: (barriers.number, barriers.count) for barriers in flagship.misc_barriers}
    assert counts["Q1_sync"] == (1, 1) and counts["O_producer"] == (2, 1)
    consumers = [barriers.count for barriers in flagship.misc_barriers if barriers.name.endswith("S0_consumer")]
    assert consumers == [256, 128], "P's first part and the correction's rescaling, then P's second part"
    pair = [barriers.count for barriers in config(128, pair_cta=True).misc_barriers[:4]]
    assert pair == [512, 256, 512, 256]


def test_order_and_publish_barriers_are_counted_once_each() -> None:
    plain, ordered = config(128), config(128, forced_order=True)
    assert ordered.barriers == plain.barriers + 2
    assert ordered.smem_base == plain.smem_base + 16
    one = config(128, BM=128, splitk_partitions=4)
    cluster = replace(one, dynamic_cluster_dim=True)
    assert cluster.smem_base == one.smem_base + 8
    assert cluster.misc_barriers[-1].count == 128 * 4


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0].dtype}-d{row[0].qk_depth}-BM{row[0].BM}")
def test_barriers_fit_in_what_is_counted_for_them(row) -> None:
    """Live barriers are those of the formula; less the chunks of Q1 that an odd number of slots has taken back."""
    c = row[0]
    rings = c.smem_base + c.kv_slots * c.slot_bytes + 16 * (c.kv_barriers // 2 - c.kv_slots)
    assert rings == c.smem_used
    tiles = c.num_q * c.q_bytes
    counted = (c.smem_base - tiles - 4 - 1024) // 8
    assert counted - sum(b.number for b in c.misc_barriers) == (c.chunks - c.num_qk_stages if c.num_q == 2 else 0)


def test_grouped_heads_are_rows_of_the_tile() -> None:
    assert not config(128, group=1).fuse_gqa and config(128, group=1).BM_eff == 256
    fused = config(128, group=4)
    assert fused.fuse_gqa and fused.BM_eff == 64
    assert not config(128, group=6).fuse_gqa and config(128, group=6).BM_eff == 256
    assert not config(128, group=4, is_mla=True).fuse_gqa
    pair = config(128, group=8, pair_cta=True)
    assert (pair.MMA_M, pair.BM_eff, pair.PairBM_eff) == (256, 32, 64)


@pytest.mark.parametrize(
    ("depth", "page_size", "bn", "pages"),
    [(128, 16, 128, 8), (128, 128, 128, 1), (128, 1024, 128, 1), (128, 48, 64, 4), (64, 64, 192, 3), (64, 256, 128, 1)],
)
def test_pages_and_tiles_divide_one_another(depth, page_size, bn, pages) -> None:
    paged = config(depth, page_size=page_size)
    assert (paged.BN, paged.pages_per_tile) == (bn, pages)
    assert paged.page_rows * pages == bn and (page_size % paged.page_rows, bn % paged.page_rows) == (0, 0)


def test_a_pair_splits_rows_of_k_and_columns_of_v() -> None:
    pair = config(128, pair_cta=True)
    assert (pair.cta_group, pair.MMA_M, pair.k_rows_per_cta, pair.v_cols_per_cta) == (2, 256, 64, 64)
    assert pair.k_chunk_bytes == 64 * 64 * 2 and pair.v_bytes == 128 * 64 * 2
    alone = config(128)
    assert (alone.cta_group, alone.MMA_M, alone.k_rows_per_cta, alone.v_cols_per_cta) == (1, 128, 128, 128)
    assert alone.k_chunk_bytes == alone.v_bytes == 32_768


def test_tensor_memory_of_one_and_two_accumulators() -> None:
    c = config(64)
    assert (c.TMEM_S0, c.TMEM_S1, c.TMEM_P0, c.TMEM_P1, c.TMEM_O0, c.TMEM_O1) == (0, 192, 0, 192, 384, 448)
    single = FA4Config("bf16", 256, 256, BM=128, single_o=True)
    assert (single.BN, single.TMEM_O0, single.TMEM_O1, single.tmem_used) == (128, 256, 256, 512)


def test_p_is_handed_over_in_three_quarters_and_one() -> None:
    assert config(128).pv_split == (96, 32) and config(64).pv_split == (144, 48)
    assert config(128, max_bn=96).pv_split == (48, 48)


def test_rotary_part_of_k_beside_a_shared_ring() -> None:
    mla = FA4Config("bf16", 192, 128, is_mla=True, nope_depth=128, BM=128)
    assert (mla.rope_depth, mla.BN, mla.num_qk_stages) == (64, 128, 1)
    assert mla.use_shared_kv and (mla.num_kv_stages, mla.rope_buffers) == (5, 3)
    assert config(128).rope_buffers == 0


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


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("depth", range(64, 129, 8))
@pytest.mark.parametrize("page_size", [0, 16, 64, 128, 256])
def test_gluon_gets_powers_of_two_that_fit(dtype: str, depth: int, page_size: int) -> None:
    wanted = config(depth, dtype, page_size=page_size)
    c, reasons = wanted.gluon()
    assert c.supported() == ()
    for length in (c.BN, c.BK0, c.padded_qk_depth, c.padded_ov_depth, c.k_chunk_bytes, c.v_bytes):
        assert length == power_below(length)
    assert c.smem_used <= SMEM_LIMIT and c.tmem_used <= TMEM_COLUMNS
    assert (c == wanted) == (reasons == ())


def test_gluon_says_what_it_changed() -> None:
    c, reasons = config(64).gluon()
    assert reasons == ("BN is 128, not 192: Gluon's tiles are powers of two",)
    assert (c.BN, c.num_kv_stages, c.smem_used) == (128, 6, 230_700)
