"""The CDNA kernel as decode: packed heads, partitions and how they are combined."""

import pytest

pytest.importorskip("triton")

import torch

from tests.sim.cdna import ARCHS, SCHEDULES, Case, check, decode_choice, paged, ready_of, simulated
from warpattn.kernels.cdna.choose import choose
from warpattn.masks import Causal, Chunked, CustomMask, Padding, SlidingWindow
from warpattn.scores import ALiBi, SoftCap
from warpattn.target import ARCHS as TARGETS

both = pytest.mark.parametrize("arch", ARCHS)


@both
@pytest.mark.parametrize("keys", [1, 2, 63, 64, 65, 127, 129, 1000])
def test_lengths(arch, keys):
    check(Case(1, keys, heads=4).call(), arch)


@both
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("partitions", [1, 7])
def test_partitions(arch, schedule, partitions):
    """More of them than key tiles leave some without keys."""
    call = Case(2, 300, heads=4, dim=128, batch=2, mask=Causal(), sinks=True).call()
    check(call, arch, decode_choice(call, arch, partitions), schedule=schedule)


@both
@pytest.mark.parametrize(("heads", "heads_kv", "tokens"), [(1, 1, 1), (8, 1, 4), (5, 1, 3), (12, 2, 16), (80, 1, 1)])
def test_packed_heads(arch, heads, heads_kv, tokens):
    """Groups that are no power of two, more rows than a tile has, more heads than rows."""
    check(Case(tokens, 300, heads=heads, heads_kv=heads_kv, mask=Causal(), sinks=True).call(), arch)


@both
@pytest.mark.parametrize(
    "mask",
    [
        SlidingWindow(100),
        Chunked(70) & Causal(),
        Padding(torch.tensor([300, 0], dtype=torch.int32)),
        CustomMask(lambda b, h, q, k: (q + k + h) % 3 != 0),
    ],
    ids=["window", "chunks", "padding", "by head"],
)
def test_masks(arch, mask):
    check(Case(3, 300, heads=4, batch=2, mask=mask).call(), arch)


@both
@pytest.mark.parametrize("score", [ALiBi(4), SoftCap(5.0)], ids=["alibi", "soft-cap"])
def test_scores(arch, score):
    check(Case(3, 300, heads=4, batch=2, mask=Causal(), score=score).call(), arch)


@both
@pytest.mark.parametrize("dim", [40, 72, 256])
def test_head_dims(arch, dim):
    check(Case(1, 300, heads=4, dim=dim, dtype=torch.float16).call(), arch)


@both
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128, 256])
def test_pages(arch, page_size):
    call = paged(Case(2, 1, heads=4, heads_kv=2, mask=Causal(), sinks=True), [70, 0, 300], page_size)
    check(call, arch, decode_choice(call, arch, 3))


@both
def test_empty_sequences(arch):
    """Rows without a key give zeros and -inf, or the sink."""
    check(paged(Case(1, 1, heads=4), [0, 0], 16), arch)
    call = paged(Case(1, 1, heads=4, sinks=True), [0, 0], 16)
    report, out, lse = simulated(call, arch, decode_choice(call, arch, 2))
    assert report.clean and out == 0 and lse < 1e-6


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
