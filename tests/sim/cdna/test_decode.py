"""The CDNA kernel as decode: packed heads, partitions and how they are combined."""

from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("triton")

import torch

from tests.drawn import drawn, each_once, in_turn
from tests.sim.cdna.calls import ARCHS, SCHEDULES, Case, check, decode_choice, outputs, paged, ready_of, simulated
from warpattn.kernels.cdna.launch import launches_of_choice
from warpattn.kernels.cdna.select import choose
from warpattn.masks import Causal, Chunked, CustomMask, Padding, SlidingWindow
from warpattn.problem.arch import ARCHS as TARGETS
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime.simulate import Options, run_launch
from warpattn.scores import ALiBi, SoftCap

both = pytest.mark.parametrize("arch", ARCHS)


@both
@pytest.mark.parametrize("keys", [1, 2, 63, 64, 65, 127, 129, 1000])
def test_lengths(arch, keys):
    check(Case(1, keys, heads=4).call(), arch)


PARTS = list(product((1, 7), ARCHS))


@pytest.mark.parametrize(("part", "schedule"), in_turn(PARTS, PARTS[1:3], [(name,) for name in SCHEDULES]), ids=str)
def test_partitions(part, schedule):
    """More of them than key tiles leave some without keys."""
    partitions, arch = part
    call = Case(2, 300, heads=4, dim=128, batch=2, mask=Causal(), sinks=True).call()
    check(call, arch, decode_choice(call, arch, partitions), schedule=schedule)


GROUPS = ((1, 1, 1), (8, 1, 4), (5, 1, 3), (12, 2, 16), (80, 1, 1))  # heads, those of keys, tokens


@pytest.mark.parametrize(("group", "arch"), drawn(product(GROUPS, ARCHS), each_once(GROUPS[2:3], ARCHS[:1])), ids=str)
def test_packed_heads(arch, group):
    """Groups that are no power of two, more rows than a tile has, more heads than rows."""
    heads, heads_kv, tokens = group
    check(Case(tokens, 300, heads=heads, heads_kv=heads_kv, mask=Causal(), sinks=True).call(), arch)


MASKS = {
    "window": SlidingWindow(100),
    "chunks": Chunked(70) & Causal(),
    "padding": Padding(torch.tensor([300, 0], dtype=torch.int32)),
    "by head": CustomMask(lambda b, h, q, k: (q + k + h) % 3 != 0),
}
SCORES = {"alibi": ALiBi(4), "soft-cap": SoftCap(5.0)}


@pytest.mark.parametrize(("name", "arch"), drawn(product(MASKS, ARCHS), each_once(list(MASKS), ARCHS)))
def test_masks(arch, name):
    check(Case(3, 300, heads=4, batch=2, mask=MASKS[name]).call(), arch)


@pytest.mark.parametrize(("name", "arch"), drawn(product(SCORES, ARCHS), each_once(list(SCORES), ARCHS[::-1])))
def test_scores(arch, name):
    check(Case(3, 300, heads=4, batch=2, mask=Causal(), score=SCORES[name]).call(), arch)


DIMS = (40, 72, 256)


@pytest.mark.parametrize(("dim", "arch"), drawn(product(DIMS, ARCHS), [(72, "gfx950")]))
def test_head_dims(arch, dim):
    check(Case(1, 300, heads=4, dim=dim, dtype=torch.float16).call(), arch)


SIZES = (1, 3, 16, 64, 100, 128, 256, 512)


@pytest.mark.parametrize(("page_size", "arch"), drawn(product(SIZES, ARCHS), each_once((1, 100), ARCHS)))
def test_pages(arch, page_size):
    call = paged(Case(2, 1, heads=4, heads_kv=2, mask=Causal(), sinks=True), [70, 0, 300], page_size)
    check(call, arch, decode_choice(call, arch, 3))


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx942"]))
def test_empty_sequences(arch):
    """Rows without a key give zeros and -inf, or the sink."""
    check(paged(Case(1, 1, heads=4), [0, 0], 16), arch)
    call = paged(Case(1, 1, heads=4, sinks=True), [0, 0], 16)
    report, out, lse = simulated(call, arch, decode_choice(call, arch, 2))
    assert report.clean and out == 0 and lse < 1e-6


@pytest.mark.parametrize(
    ("tokens", "arch"), drawn(product(range(2, 17), ARCHS), [(13, "gfx942")])
)
def test_speculative_tokens(arch, tokens):
    """The tokens of a group share the rows of a tile: 32, 48 and up to 64 of them, then tiles of their own."""
    call = paged(Case(tokens, 1, heads=4, mask=Causal(), sinks=True), [tokens + 70, tokens - 1, tokens], 16)
    check(call, arch)


@both
def test_batch_invariance(arch):
    """The same bits for a sequence alone and among others that let the planner share out keys otherwise."""
    torch.manual_seed(3)
    many = paged(Case(1, 1, heads=4, mask=Causal(), sinks=True), [700, 70, 300], 16)
    cache = many.sequence
    results = []
    for width, rows in ((44, slice(0, 1)), (50, slice(0, 3))):
        table = torch.full((rows.stop, width), 10**8, dtype=torch.int32)
        table[:, :44] = cache.block_table[rows]
        part = replace(many, q=many.q[rows], sequence=replace(cache, block_table=table, lengths=cache.lengths[rows]))
        ready = ready_of(part, arch)
        choice = choose(ready.problem, TARGETS[arch], batch_invariant=True)
        assert choice.partitions == 1 < choose(ready.problem, TARGETS[arch]).partitions
        out, lse = outputs(part, ready)
        given = cache.operands(part.q, part.k, part.v).values()
        (step,) = launches_of_choice(
            ready, fitted(Operands(part.q, *list(given)[1:], out, lse, part.sinks)), part.sequence, choice
        )
        assert run_launch(step, Options()).clean
        results.append((out[0], lse[0]))
    assert all(map(torch.equal, *results)) and not results[0][0].isnan().any()


@both
def test_counts_of_partitions(arch):
    """Section 4.6: none for few keys, one or two workgroups a CU for few heads, long parts for many."""
    target = TARGETS[arch]

    def partitions(batch: int, keys: int, heads_kv: int) -> int:
        ready = ready_of(Case(1, 1, heads=heads_kv, heads_kv=heads_kv, batch=1).call(), arch)
        problem = type(ready.problem)(**{**vars(ready.problem), "batch": batch, "seq_k": keys, "heads_kv": heads_kv})
        return choose(problem, target).partitions

    assert partitions(1, 256, 8) == 1
    assert partitions(1, 131_072, 8) * 8 >= target.processors
    assert partitions(64, 8192, 8) == 4, "512 key heads: parts of 256 * 8 keys"
    assert partitions(1, 1024, 8) == 4, "no part has fewer than 256 keys"
