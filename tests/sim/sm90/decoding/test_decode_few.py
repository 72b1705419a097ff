"""Decode with keys on the left of products: when it is chosen, its transposed softmax, and the bits it leaves alone."""

from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn, in_turn
from tests.sim.sm90.decode import Decode, check, tensors
from tests.sim.sm90.decoding.test_decode import APART, CASES, MIXED, SCHEDULES, SLOPES
from warpattn.kernels.sm90.decode.choice import SLACK, SM_SMEM, choose
from warpattn.kernels.sm90.decode.config import DecodeConfig
from warpattn.kernels.topology import BARRIER_BYTES
from warpattn.language.expr import where
from warpattn.masks import Causal, CustomMask
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import PlanOptions
from warpattn.scores import CustomScore, SoftCap


def chosen(case: Decode) -> DecodeConfig:
    q, (k, v), sequence, _ = tensors(case)
    k, v = (sequence.k_pages, sequence.v_pages) if case.page else (k, v)
    ready = validate(Call(q, k, v, sequence, backend="reference"), read_values=False)
    return choose(ready.problem, ARCHS["sm90"], options=PlanOptions(batch_invariant=case.invariant)).config


@pytest.mark.parametrize(
    ("case", "columns"),
    [
        (Decode((70,), heads=1), 8),
        (Decode((70,), heads=8, heads_kv=1), 8),
        (Decode((70,), heads=9, heads_kv=1), 16),
        (Decode((70,), heads=8, heads_kv=2, tokens=4), 16),
        (Decode((70,), heads=17, heads_kv=1), 0),
        (Decode((70,), heads=8, heads_kv=4, tokens=9), 0),
        (Decode((70,), dim=32, dim_v=40), 8),
        (Decode((70,), dim=64, dim_v=32), 0),  # a product has 64 rows on its left: columns of values
        (Decode((70,), dim=256, page=3), 8),
        (Decode((70,), page=64, invariant=True), 8),
    ],
)
def test_when_it_is_chosen(case, columns):
    swap_ab = chosen(case).swap_ab
    assert (swap_ab.columns if swap_ab else 0) == columns


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_shared_memory(dim):
    """Queries, P and a transposed output take the place of 64 rows of queries, and CTAs still fit on an SM."""
    config = chosen(Decode((70,), dim=dim))
    tile = config.k_bytes + config.v_bytes + 4 * BARRIER_BYTES
    assert config.smem_bytes == config.stages * tile + 8 * (2 * dim + 2 * config.block_n + 4 * (dim + 5))
    assert config.ctas * (config.smem_bytes + SLACK + 1024) <= SM_SMEM


CHOSEN = [name for name, case in CASES.items() if getattr(chosen(case).swap_ab, "columns", 0) == 8]
assert len(CHOSEN) > 10


# Of those that are chosen: the rest are the same code behind the products.
DRAWN = ("paged-gathered",)


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(CHOSEN, DRAWN, SCHEDULES, each=6))
def test_64_rows_where_swap_ab_is_chosen(name, schedule, seed):
    case = CASES[name]
    check(replace(case, config=(*case.config, ("swap_ab", None))), programs=5, schedule=schedule, seed=seed)


KEPT = ("sinks-alibi-window",)


@pytest.mark.parametrize(("name", "schedule"), in_turn(CHOSEN, KEPT, [("lazy",), ("adversarial",)]))
def test_16_rows_where_8_would_do(name, schedule):
    case = CASES[name]
    check(replace(case, config=(*case.config, ("swap_ab.columns", 16))), programs=5, schedule=schedule)


GROUPS, TOKENS = (1, 2, 5, 8), (1, 2, 3, 8, 16)


@pytest.mark.parametrize(("group", "tokens"), drawn(product(GROUPS, TOKENS), [(1, 16)]))
def test_rows_fill_a_tile_or_not(group, tokens):
    check(Decode((300, 300), heads=2 * group, heads_kv=2, tokens=tokens, mask=Causal()), programs=4)


FITTING = [(n, dim) for n, dim in product((64, 128, 256), repeat=2) if n * dim <= 128 * 128]  # two slots each


@pytest.mark.full
@pytest.mark.parametrize(("block_n", "dim"), drawn(FITTING, [(64, 256)]))
def test_key_tiles(block_n, dim):
    check(Decode((600, 130), dim=dim, page=64, config=(("block_n", block_n), ("stages", 2))), programs=4)


RISING = CustomScore(lambda s, b, h, q, k: s + k * 0.5)
SCORES = {
    "rising": RISING,  # the reference moves with every tile
    "falling": CustomScore(lambda s, b, h, q, k: s - k * 0.5),  # never again
    "one key": CustomScore(lambda s, b, h, q, k: where(k == 211, s + 60.0, s)),  # one warp's, in the middle
    "one key of one head": CustomScore(lambda s, b, h, q, k: where((k == 64) & (h == 1), s + 30.0, s)),
    "opposite": CustomScore(lambda s, b, h, q, k: where(h % 2 == 0, s + k * 2.0, s - k * 2.0)),
    "within the headroom": CustomScore(lambda s, b, h, q, k: s + (k % 5)),
    "least": CustomScore(lambda s, b, h, q, k: where(k < 150, -1e30, s)),
    "far below 0": CustomScore(lambda s, b, h, q, k: s - 500.0),
}


MOVES = list(product(SCORES, (1, 4)))
MOVING = [("eager", 0), ("adversarial", 0), ("random", 1)]


@pytest.mark.parametrize(
    ("move", "schedule", "seed"), in_turn(MOVES, [("opposite", 4)], MOVING, each=3), ids=str
)
def test_references_that_move(move, schedule, seed):
    name, tokens = move
    case = Decode((400, 400), tokens=tokens, mask=Causal(), score=SCORES[name], config=(("block_n", 64),))
    check(case, programs=3, schedule=schedule, seed=seed)


def test_rows_that_see_nothing_for_a_while():
    """The first tiles hide every key from some rows, and the last row sees none at all."""
    seen = CustomMask(lambda b, h, q, k: (k >= h * 100) & (h < 3))
    ran = check(Decode((350,), mask=seen, config=(("block_n", 64),)), programs=2)
    assert torch.isneginf(ran.lse[0, 3]).all() and not ran.out[0, :, 3].any()
    assert torch.isfinite(ran.lse[0, :3]).all()


@pytest.mark.full
def test_sinks_scores_and_parts_added_up_apart():
    case = Decode(MIXED, page=16, heads=8, heads_kv=2, tokens=3, mask=Causal(), score=SoftCap(3.0), sinks=True)
    check(replace(case, config=APART), programs=7)
    check(replace(case, heads=4, heads_kv=1, score=SLOPES), programs=7, schedule="random", seed=2)


def test_a_row_has_the_same_bits_among_others():
    """Rows of a tile share nothing but the moment at which references move; within the headroom none does."""
    score = CustomScore(lambda s, b, h, q, k: s * 0.01)
    several = Decode((500,), heads=4, heads_kv=4, tokens=1, score=score)
    rows = check(several, 2)
    wide = check(replace(several, config=(("swap_ab.columns", 16),)), 2)
    assert torch.equal(rows.out, wide.out) and torch.equal(rows.lse, wide.lse)
