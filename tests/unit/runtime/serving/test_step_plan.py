"""StepPlan: steps of an engine of different sizes against the reference, indices of its own, what it refuses; on a card
(a driver that notes what it gets) a step only writes addresses and the number of sequences."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.unit.runtime.test_dispatch import Driver, driver, half  # noqa: F401  a fixture
from warpattn.kernels.cdna.config import PagedRaggedIndices
from warpattn.kernels.cdna.launch import launches_of_choice
from warpattn.problem import Call, rules, validate
from warpattn.problem.argument_types import fields
from warpattn.problem.operands import Operands
from warpattn.runtime import cuda
from warpattn.sequences import PagedRagged
from warpattn.serving.step_plan import BATCHES

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def indices(queries, keys, width: int = 4):
    """(cu_q, lengths, block_table) of a step over pages of 16 keys."""
    cu_q = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    table = torch.arange(len(keys) * width, dtype=torch.int32).reshape(len(keys), width)
    return cu_q, torch.tensor(keys, dtype=torch.int32), table


def step(queries, keys, pages, dtype=torch.float32):
    cu_q, lengths, table = indices(queries, keys)
    q = torch.randn(int(cu_q[-1]), 4, 16).to(dtype)
    return q, wa.PagedKV(*pages, table, lengths), wa.Ragged(cu_q)


def largest(pages, max_q=None, **tail):
    q, kv, seq = step((30, 1, 1, 8), (40, 9, 64, 8), pages, pages[0].dtype)
    return wa.StepPlan(q, kv, wa.Ragged(seq.cu_q, max_q=max_q), **tail)


def pages_of(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(16, 16, 2, 32).to(dtype).split(16, -1)


def eight_bit(kv: wa.PagedKV) -> wa.PagedKV:
    """The same pages in e4m3."""
    k, v = (wa.quantize(x) for x in (kv.k_pages, kv.v_pages))
    return kv.with_fields(k_pages=k.values, v_pages=v.values, k_scale=k.scale, v_scale=v.scale)


STEPS = [((30, 1, 1, 8), (40, 9, 64, 8)), ((1, 1), (30, 64)), ((0, 5, 1), (9, 5, 33)), ((1,), (1,))]


@pytest.mark.parametrize(("queries", "keys"), STEPS)
def test_steps_of_any_size(queries, keys):
    pages = pages_of()
    plan = largest(pages, mask=wa.Causal(), sinks=SINKS)
    q, kv, seq = step(queries, keys, pages)
    wanted = wa.attention_paged(q, kv, seq, mask=wa.Causal(), sinks=SINKS)
    torch.testing.assert_close(plan(q, kv, seq), wanted)
    out = torch.full_like(q, torch.nan)
    assert plan(q, kv, seq, out=out) is out and torch.equal(out, wanted)
    other = wa.attention_paged(q, kv, seq, mask=wa.Causal(), sinks=-SINKS)
    torch.testing.assert_close(plan(q, kv, seq, sinks=-SINKS), other)


def test_own_indices_serve_every_update():
    pages = pages_of()
    plan = largest(pages, mask=wa.Causal())
    at = [x.data_ptr() for x in (plan.seq.cu_q, plan.kv.lengths, plan.kv.block_table)]
    for queries, keys in STEPS:
        q, kv, seq = step(queries, keys, pages)
        plan.update(seq.cu_q, kv.lengths, kv.block_table[:, :4])
        assert plan.seq.cu_q.tolist() == seq.cu_q.tolist() + [len(q)] * (5 - len(seq.cu_q))
        assert plan.kv.lengths.tolist() == list(keys) + [0] * (4 - len(keys))
        wanted = wa.attention_paged(q, kv, seq, mask=wa.Causal())
        torch.testing.assert_close(plan(q, plan.kv, plan.seq), wanted)
    assert at == [x.data_ptr() for x in (plan.seq.cu_q, plan.kv.lengths, plan.kv.block_table)]


def test_steps_keep_the_bound_of_the_plan():
    """Kernels that a bound left out would leave rows unwritten."""
    pages = pages_of()
    plan = largest(pages, 8)
    q, kv, seq = step((8, 1), (30, 64), pages)
    torch.testing.assert_close(plan(q, kv, seq), wa.attention_paged(q, kv, seq))
    with pytest.raises(wa.AttentionError, match=r"seq\.max_q is 9; the plan was made for sequences of up to 8"):
        plan(q, kv, wa.Ragged(seq.cu_q, max_q=9))
    q, kv, seq = step((9, 1), (30, 64), pages)
    with pytest.raises(wa.AttentionError, match=r"seq\.max_q is 8; sequence 0 has 9 rows by seq\.cu_q"):
        plan(q, kv, seq)


@pytest.mark.parametrize("first", ["seq", "kv"])
def test_own_indices_of_both_modes_are_written(first):
    """Those that were made in inference mode and those that were not."""
    plan = largest(pages_of())
    getattr(plan, first)
    with torch.inference_mode():
        plan.update(*indices((1,), (3,)))
    plan.update(*indices((2,), (5,)))
    assert plan.seq.cu_q.tolist() == [0, 2, 2, 2, 2] and plan.kv.lengths.tolist() == [5, 0, 0, 0]


def test_rows_after_the_last_sequence_are_padding():
    """They are not read and not written, as on a card; scales of tokens end with them."""
    pages, rows = pages_of(), 4
    q, kv, seq = step((3, 1), (9, 64), pages)
    padded = torch.cat([q, torch.full((5, 4, 16), torch.nan)])
    plan = wa.StepPlan(padded, kv, seq)
    out = torch.full_like(padded, 7.0)
    plan(padded, kv, seq, out=out)
    torch.testing.assert_close(out[:rows], wa.attention_paged(q, kv, seq))
    assert (out[rows:] == 7.0).all()
    narrow, eight = wa.quantize(torch.cat([q, q[:1]]), per="token"), eight_bit(kv)
    found = wa.StepPlan(narrow, eight, seq)(narrow, eight, seq)
    own = wa.Quantized(narrow.values[:rows], narrow.scale[:rows])
    torch.testing.assert_close(found[:rows], wa.attention_paged(own, eight, seq))


def test_scales_of_heads_belong_to_any_rows():
    """Of fewer tokens than heads, too."""
    pages = pages_of(torch.bfloat16)
    (q, kv, seq), scale = step((2,), (30,), pages), torch.tensor([0.5, 1.0, 2.0, 4.0])
    given = wa.Quantized(torch.cat([q, q]).to(torch.float8_e4m3fn), scale), eight_bit(kv), seq
    expected = wa.attention_paged(wa.Quantized(given[0].values[:2], scale), *given[1:])
    assert torch.equal(wa.StepPlan(*given)(*given)[:2], expected)


def test_gradients_of_a_step_are_refused():
    """Of its own sinks and scales, too."""
    pages = pages_of()
    q, kv, seq = step((1, 1), (30, 64), pages)
    with pytest.raises(wa.AttentionError, match=r"^sinks requires a gradient; a plan has no backward"):
        wa.StepPlan(q, kv, seq, sinks=SINKS)(q, kv, seq, sinks=SINKS.clone().requires_grad_())
    eight = eight_bit(kv)
    asking = eight.with_fields(k_scale=torch.ones((), requires_grad=True))
    with pytest.raises(wa.AttentionError, match=r"^kv.k_scale requires a gradient; a plan has no backward"):
        wa.StepPlan(q, eight, seq)(q, asking, seq)


def test_an_output_that_requires_a_gradient():
    """A kernel would write it without a word."""
    pages = pages_of()
    q, kv, seq = step((1, 1), (30, 64), pages)
    k, v = torch.randn(2, 9, 2, 16)
    ragged = wa.Ragged(*(torch.tensor([0, *ends], dtype=torch.int32) for ends in ((1, 2), (4, 9))))
    for call in (
        lambda out: wa.StepPlan(q, kv, seq)(q, kv, seq, out=out),
        lambda out: wa.DecodePlan(q[:, None], kv)(q[:, None], kv, out[:, None]),
        lambda out: wa.PrefillPlan(q, k, v, ragged)(q, k, v, ragged, out),
    ):
        out = torch.zeros_like(q, requires_grad=True)
        with pytest.raises(wa.AttentionError, match=r"^out requires a gradient; a plan has no backward"):
            call(out)
        with torch.no_grad():
            call(out)
        assert out.any()


@pytest.mark.parametrize("name", ["kv.k_scale", "seq.cu_q", "kv.lengths", "kv.block_table", "kv.k_pages", "q", "sinks"])
def test_tensors_of_a_step_have_values(name):
    """A tensor on the device meta has the number of the CPU."""
    q, kv, seq = step((1, 1), (30, 64), pages_of())
    kv = eight_bit(kv)
    plan = wa.StepPlan(q, kv, seq, sinks=SINKS)
    given = {"q": q, "sinks": SINKS, "seq.cu_q": seq.cu_q, "kv.k_scale": kv.k_scale, "kv.lengths": kv.lengths,
             "kv.block_table": kv.block_table, "kv.k_pages": kv.k_pages}  # fmt: skip
    given[name] = given[name].to("meta")
    fields = {key.removeprefix("kv."): x for key, x in given.items() if key.startswith("kv.")}
    with pytest.raises(wa.AttentionError, match=rf"^{name} is on the device meta .*; {name} must have values"):
        plan(given["q"], kv.with_fields(**fields), wa.Ragged(given["seq.cu_q"]), sinks=given["sinks"])


def test_what_it_refuses():
    pages = pages_of()
    plan = largest(pages)
    q, kv, seq = step((1, 1), (30, 64), pages)
    with pytest.raises(wa.AttentionError, match="the step has 2 sequences and 50 rows of q"):
        plan(torch.randn(50, 4, 16), kv, seq)
    with pytest.raises(wa.AttentionError, match="the step has 5 sequences"):
        plan(*step((1,) * 5, (9,) * 5, pages))
    with pytest.raises(wa.AttentionError, match="cu_q has 4"):
        plan(q, kv, wa.Ragged(torch.zeros(4, dtype=torch.int32)))
    with pytest.raises(wa.AttentionError, match="q has shape"):
        plan(q[:, :2], kv, seq)
    with pytest.raises(wa.AttentionError, match="k_pages has shape"):
        plan(q, wa.PagedKV(pages[0][:8], pages[1][:8], kv.block_table, kv.lengths), seq)
    with pytest.raises(wa.AttentionError, match="sinks is given; the plan was made without"):
        plan(q, kv, seq, sinks=SINKS)
    with pytest.raises(wa.AttentionError, match="out has 3 rows"):
        plan(q, kv, seq, out=torch.empty(3, 4, 16))
    with pytest.raises(wa.AttentionError, match="a StepPlan takes a PagedKV"):
        plan(q, kv, None)
    with pytest.raises(wa.AttentionError, match="a StepPlan takes a PagedKV"):
        wa.StepPlan(q, (1, 2), seq)
    with pytest.raises(wa.AttentionError, match=r"kv.block_table 1 row; kv.lengths has 2 sequences"):
        plan(q, kv.with_fields(block_table=kv.block_table[:1]), seq)
    with pytest.raises(wa.AttentionError, match=r"lengths has dtype torch.int64; it must be torch.int32"):
        plan.update(seq.cu_q, kv.lengths.long(), kv.block_table)
    with pytest.raises(wa.AttentionError, match="cu_q has 2 rows; for 2 sequences it must have 3"):
        plan.update(seq.cu_q[:2], kv.lengths, kv.block_table)
    with pytest.raises(wa.AttentionError, match="up to 5 pages; the plan was made for up to 4 of 4"):
        plan.update(seq.cu_q, kv.lengths, torch.zeros(2, 5, dtype=torch.int32))


@pytest.fixture
def on_card(driver, monkeypatch):  # noqa: F811
    """CPU tensors planned for Hopper's kernels."""
    monkeypatch.setattr(rules, "choose_backend", lambda *_: "sm90")
    return driver


COPIED = {
    "sinks has dtype torch.bfloat16": lambda q, kv, seq: (q, kv, seq, SINKS.bfloat16()),
    "strides (2,); a plan makes no copies: sinks must be contiguous": lambda q, kv, seq: (q, kv, seq, holes(SINKS)),
    "q has shape (40, 4, 16), strides (80, 20, 1)": lambda q, kv, seq: (
        torch.cat([q, q], -1)[..., :20].contiguous()[..., :16], kv, seq, SINKS
    ),
    "a tensor was copied; each tensor must have memory of its own, offsets, lengths": lambda q, kv, seq: (
        q, kv.with_fields(lengths=holes(kv.lengths)), seq, SINKS
    ),
    "a tensor was copied; each": lambda q, kv, seq: (q, kv, wa.Ragged(holes(seq.cu_q)), SINKS),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch imports decompositions
@pytest.mark.parametrize("gradients", [False, True])
def test_forward_mode_tangents_are_refused_where_kernels_run(gradients, on_card):
    pages = pages_of(torch.bfloat16)
    q, kv, seq = step((1, 1), (30, 64), pages, torch.bfloat16)
    steps, decode = wa.StepPlan(q, kv, seq, sinks=SINKS), wa.DecodePlan(q[:, None], kv)
    refused = "carries a forward-mode tangent; a plan has no derivatives"
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(gradients):
        dual, sinks = (torch.autograd.forward_ad.make_dual(x, x) for x in (q, SINKS))
        with pytest.raises(wa.AttentionError, match=f"^q {refused}"):
            steps(dual, kv, seq)
        with pytest.raises(wa.AttentionError, match=f"^sinks {refused}"):
            steps(q, kv, seq, sinks=sinks)
        with pytest.raises(wa.AttentionError, match=f"^q {refused}"):
            decode(dual[:, None], kv)
        steps(q, kv, seq)
        decode(q[:, None], kv)
    assert len(on_card.launches) == 2


def holes(x: torch.Tensor) -> torch.Tensor:
    """The same elements with others between them."""
    return torch.stack([x, x + 1], -1)[..., 0]


@pytest.mark.parametrize("words", COPIED)
def test_a_plan_refuses_what_it_would_have_to_copy(words, on_card):
    *given, sinks = COPIED[words](*step((30, 1, 1, 8), (40, 9, 64, 8), pages_of(torch.bfloat16), torch.bfloat16))
    with pytest.raises(wa.AttentionError, match=re.escape(words)):
        wa.StepPlan(*given, sinks=sinks)


@pytest.mark.parametrize(("max_q", "launches"), [(None, 3), (1, 1)])
def test_a_step_writes_addresses_and_the_number_of_sequences(max_q, launches, on_card, monkeypatch):
    pages = pages_of(torch.bfloat16)
    plan = largest(pages, max_q, mask=wa.Causal())
    seen = len(on_card.launches)
    q, kv, seq = step((1, 1), (30, 64), pages, torch.bfloat16)
    monkeypatch.setattr(cuda, "load_function", None)  # nothing is loaded, planned or allocated again
    monkeypatch.setattr(torch, "empty", None)
    plan(q, kv, seq, out=torch.empty_like(q))
    assert len(on_card.launches) - seen == launches
    assert {cell.value for cell in plan._batch} == {2} and len(plan._batch) == (1 if max_q == 1 else 2)


def counts(value: object, path: str) -> list[str]:
    """Paths of the numbers of sequences in a launch's argument."""
    if not isinstance(value, tuple):
        return []
    inside = [found for name, part in fields(value) for found in counts(part, f"{path}.{name}")]
    return [*inside, f"{path}.batch"] if isinstance(value, PagedRaggedIndices) else inside


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_step_on_cdna_writes_its_number_of_sequences_wherever_it_is(arch: str) -> None:
    """Under a mask arguments are passed twice."""
    q, kv, seq = step((3, 1), (40, 9), pages_of(torch.bfloat16), torch.bfloat16)
    both = PagedRagged(kv, seq)
    ready = validate(Call(q, kv.k_pages, kv.v_pages, both, wa.Causal(), backend=f"simulate:{arch}"))
    operands = Operands(q, kv.k_pages, kv.v_pages, torch.empty_like(q), None, None)
    first, *_ = launches_of_choice(ready, operands, both)
    found = [path for name, value in first.args.items() for path in counts(value, name)]
    assert sorted(found) == ["again.indices.batch", "indices.batch"] and set(found) <= set(BATCHES)


def a_workspace(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def test_a_step_of_short_prompts_leaves_copies_out(on_card):
    """Launches of copies and of the prefill over them; without, the other prefill attends for all sequences."""
    q, kv, seq = step((1100, 1), (64, 9), pages_of(torch.bfloat16), torch.bfloat16)
    plan = wa.StepPlan(q, eight_bit(kv), seq, mask=wa.Causal(), workspace=a_workspace(2**20))
    assert plan.copied_queries == 512
    names = [launch.name for launch in plan._bound.each]
    prefill = ["sm90.order", "sm90.prefill_varlen"]
    assert names == ["sm90.places", "sm90.copy_places", *prefill, *prefill, "sm90.decode"]
    over_copies, over_pages = plan._bound.cells("only.copied")
    for max_q, launches, copied in ((None, 7, -1), (511, 3, 0), (512, 7, -1), (1, 3, 0), (None, 7, -1)):
        seen = len(on_card.launches)
        plan(q, eight_bit(kv), wa.Ragged(seq.cu_q, max_q=max_q))
        assert len(on_card.launches) - seen == launches
        assert (over_copies.value, over_pages.value) == (1, copied)


@pytest.mark.parametrize(
    "change",
    [
        {"mask": wa.SlidingWindow(20)}, {"batch_invariant": True}, {"workspace": a_workspace(100)}, {"workspace": None},
        {"mask": wa.Causal()},  # half of 601 queries see a key in the mean, at most: less than 512
    ],
    ids=["window", "batch-invariant", "less-than-a-place", "none", "too-few-queries"],
)
def test_plans_without_copies(change, on_card):
    q, kv, seq = step((600, 1), (64, 9), pages_of(torch.bfloat16), torch.bfloat16)
    options = {"workspace": a_workspace(2**20)}
    plan = wa.StepPlan(q, eight_bit(kv), seq, **options | change)
    assert plan.copied_queries is None and not plan._bound.cells("shape.least")
    assert wa.StepPlan(q, eight_bit(kv), seq, **options).copied_queries == 512


@pytest.mark.parametrize(("decoded", "queries"), [(0, 4), (np.int64(3), 4), (4, 4), (5, 5), (16, 16)])
def test_decode_takes_sequences_of_as_many_queries_as_expected(decoded, queries, on_card):
    """Without a number, as many as 8 rows of a group of two heads have."""
    q, kv, seq = step((30, 1), (40, 9), pages_of(torch.bfloat16), torch.bfloat16)
    plan = wa.StepPlan(q, kv, seq, mask=wa.Causal(), decoded=decoded)
    assert {cell.value for cell in plan._bound.cells("shape.tokens")} == {queries}
    assert {cell.value for cell in plan._bound.cells("only.least_q")} == {queries + 1}


@pytest.mark.parametrize(("decoded", "kind"), [(17, "17"), (-1, "-1"), (True, "True"), (4.0, "4.0"), ("4", "'4'")])
def test_a_wrong_number_of_decoded_queries(decoded, kind):
    q, kv, seq = step((30, 1), (40, 9), pages_of())
    rule = "decoded must be an int from 0 to 16"
    with pytest.raises(wa.AttentionError, match=f"^decoded is {kind}; {rule}$"):
        wa.StepPlan(q, kv, seq, decoded=decoded)


@pytest.mark.parametrize(
    ("workspace", "words"),
    [
        (a_workspace(64, dtype=torch.int32), "workspace has dtype torch.int32; it must be torch.uint8"),
        (a_workspace(8, 8), "workspace has shape (8, 8); workspace must be rank 1 (bytes)"),
        (a_workspace(64)[::2], "workspace has strides (2,); it must be contiguous"),
        (a_workspace(64)[1:], "it must start at a multiple of 16 bytes"),
        (torch.empty(64, dtype=torch.uint8, device="meta"), "workspace is on the device meta"),
        ([1, 2], "workspace is a list"),
    ],
)
def test_a_wrong_workspace(workspace, words):
    q, kv, seq = step((30, 1), (40, 9), pages_of())
    with pytest.raises(wa.AttentionError, match=re.escape(words)):
        wa.StepPlan(q, kv, seq, workspace=workspace)


def test_a_workspace_is_apart():
    q, kv, seq = step((30, 1), (40, 9), [x.contiguous() for x in pages_of()])
    with pytest.raises(wa.AttentionError, match=r"^workspace shares memory with kv.v_pages; steps overwrite it"):
        wa.StepPlan(q, kv, seq, workspace=kv.v_pages.view(torch.uint8).flatten())
    workspace = a_workspace(q.numel() * 4)
    with pytest.raises(wa.AttentionError, match=r"^out shares memory with workspace"):
        wa.StepPlan(q, kv, seq, workspace=workspace)(q, kv, seq, out=workspace.view(q.dtype).view(q.shape))


def test_the_reference_needs_no_workspace():
    q, kv, seq = step((30, 1), (40, 9), pages_of())
    plan = wa.StepPlan(q, kv, seq, workspace=a_workspace(64))
    assert plan.copied_queries is None and torch.equal(plan(q, kv, seq), wa.attention_paged(q, kv, seq))
