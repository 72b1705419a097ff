"""The CDNA kernel as prefill: lengths, head dims, masks, scores, sinks, groups, ragged and paged batches."""

from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("triton")

import torch

from tests.drawn import drawn, each_once
from tests.sim.cdna.calls import ARCHS, Case, check, paged, ragged, ready_of
from warpattn.errors import AttentionError
from warpattn.kernels.cdna.launch import launches_of_choice
from warpattn.masks import Causal, Chunked, CustomMask, Document, Full, Materialized, Padding, Prefix, SlidingWindow
from warpattn.problem.operands import Operands, fitted
from warpattn.reference import reference
from warpattn.runtime.simulate import Options, run_launch
from warpattn.scores import ALiBi, Bias, CustomScore, SoftCap

both = pytest.mark.parametrize("arch", ARCHS)
MASKS = {
    "window": SlidingWindow(30),
    "two-sided window": SlidingWindow(30, 10),
    "chunks": Chunked(50),
    "chunks and causal": Chunked(50) & Causal(),
    "top left": Causal(top_left=True),
    "padding": Padding(torch.tensor([30, 0], dtype=torch.int32)),
    "prefix": Prefix(20),
    "documents": Document(torch.arange(90).repeat(2, 1) // 40),
    "boolean tensor": Materialized(torch.arange(90).expand(2, 2, 70, 90) % 3 != 0),
    "additive tensor": Materialized(torch.linspace(-2, 2, 90).expand(2, 2, 70, 90)),
    "or": SlidingWindow(20) | Prefix(10),
    "outside a window": ~SlidingWindow(30, 10),
    "nothing": CustomMask(lambda b, h, q, k: k < 0),
    "custom": CustomMask(lambda b, h, q, k: (q + k + h) % 3 != 0),
}
SCORES = {
    "alibi": ALiBi(2),
    "soft-cap": SoftCap(5.0),
    "bias": Bias(torch.linspace(-3, 3, 90).expand(2, 2, 70, 90)),
    "custom": CustomScore(lambda s, b, h, q, k: s * 0.5 + h),
    "two": SoftCap(5.0) | ALiBi(2),
}


@both
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 129])
def test_odd_lengths(arch, length):
    check(Case(max(17, length), length, mask=Causal(), sinks=True).call(), arch)


DIMS = ((8, 8), (40, 72), (64, 40), (72, 72), (128, 64), (136, 200), (256, 256))


@pytest.mark.parametrize(("dims", "arch"), drawn(product(DIMS, ARCHS), each_once(DIMS[3::2], ARCHS)), ids=str)
def test_head_dims(arch, dims):
    check(Case(70, 90, dim=dims[0], dim_v=dims[1], mask=Causal()).call(), arch)


# Of indices, lengths and tensors, alone and together.
DRAWN_MASKS = (
    "two-sided window", "padding", "chunks and causal", "additive tensor", "nothing", "or", "outside a window"
)  # fmt: skip


@pytest.mark.parametrize(("name", "arch"), drawn(product(MASKS, ARCHS), each_once(DRAWN_MASKS, ARCHS)))
def test_masks(arch, name):
    check(Case(70, 90, batch=2, mask=MASKS[name], sinks=name == "padding").call(), arch)


@pytest.mark.parametrize(("name", "arch"), drawn(product(SCORES, ARCHS), each_once(("bias", "custom", "two"), ARCHS)))
def test_scores(arch, name):
    check(Case(70, 90, batch=2, mask=Causal(), score=SCORES[name]).call(), arch)


PROBLEMS = {
    "fp16": Case(70, 90, dtype=torch.float16, mask=Causal()),
    "groups": Case(70, 90, heads=6, heads_kv=2, sinks=True),
    "batch": Case(70, 90, heads=3, heads_kv=3, batch=3, mask=Causal()),
    "more queries than keys": Case(200, 30, mask=Causal()),
    "negative scale": Case(70, 90, scale=-0.2),
}


@pytest.mark.parametrize(("name", "arch"), drawn(product(PROBLEMS, ARCHS), each_once(list(PROBLEMS), ARCHS)))
def test_problems(arch, name):
    check(PROBLEMS[name].call(), arch)


@both
def test_strided_operands(arch):
    """Heads before rows in memory, and an output between others."""
    call = Case(70, 90, heads=2, heads_kv=2).call()
    moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (call.q, call.k, call.v)]
    check(Case(70, 90, heads=2, heads_kv=2).on(*moved, call.sequence), arch)


@pytest.mark.parametrize(("queries", "arch"), drawn(product((1, 70), ARCHS), each_once((1, 70), ARCHS)))
def test_without_lse(arch, queries):
    call = replace(Case(queries, 600, mask=Causal()).call(), return_lse=False)
    ready = ready_of(call, arch)
    out = torch.full((1, queries, 2, 64), float("nan"), dtype=torch.bfloat16)
    for step in launches_of_choice(ready, fitted(Operands(call.q, call.k, call.v, out, None, None)), call.sequence):
        assert run_launch(step, Options()).clean
    expected, _ = reference(call.q, call.k, call.v, mask=call.mask)
    assert (out.float() - expected).abs().max() < 1.6e-2


@both
def test_an_output_with_far_rows_is_refused(arch):
    call = Case(70, 90).call()
    far = torch.empty_strided((1, 70, 2, 64), (0, 2**23, 64, 1), dtype=torch.bfloat16, device="meta")
    with pytest.raises(AttentionError, match="row stride of 8388608 elements"):
        launches_of_choice(ready_of(call, arch), Operands(call.q, call.k, call.v, far, None, None), call.sequence)


@both
@pytest.mark.parametrize("max_q", [None, 130])
def test_ragged(arch, max_q):
    check(ragged(Case(1, 1, mask=Causal()), [5, 0, 130, 64], max_q=max_q), arch)


@both
def test_ragged_keys_of_their_own(arch):
    check(ragged(Case(1, 1, mask=Full(), sinks=True), [5, 0, 130, 64], [7, 3, 0, 200]), arch)


SIZES = (1, 3, 16, 64, 128, 256)


@pytest.mark.parametrize(("page_size", "arch"), drawn(product(SIZES, ARCHS), each_once((3, 16, 64), ARCHS)))
def test_pages(arch, page_size):
    check(paged(Case(40, 1, heads=4, heads_kv=2, mask=Causal()), [70, 0, 129], page_size), arch)


@pytest.mark.parametrize(("page_size", "arch"), drawn(product((16, 64), ARCHS), each_once((16, 64), ARCHS)))
def test_pages_of_padded_head_dims(arch, page_size):
    check(paged(Case(40, 1, dim=72, mask=Causal()), [70, 0, 129], page_size), arch, schedule="adversarial")
