"""Plans for serving on the CPU: results as of a call, an output of their own, one sentence for what does not fit."""

from __future__ import annotations

import pytest
import torch

import warpattn as wa
from tests.unit.runtime.serving.test_step_plan import pages_of, step
from warpattn.sequences import Sequence


def cache(pages: int = 9, page: int = 4, batch: int = 2) -> wa.PagedKV:
    k, v = torch.randn(pages, page, 2, 16), torch.randn(pages, page, 2, 24)
    table = torch.randperm(pages)[: batch * 4].reshape(batch, 4).int()
    return wa.PagedKV(k, v, table, torch.tensor([13, 6], dtype=torch.int32))


def test_a_decode_plan_follows_its_inputs():
    q, kv = torch.randn(2, 1, 4, 16), cache()
    plan = wa.DecodePlan(q, kv, mask=wa.Causal(), score=wa.SoftCap(5.0), return_lse=True)
    for _ in range(3):
        q, kv = torch.randn(2, 1, 4, 16), cache()
        plan.out.fill_(torch.nan)
        out, lse = plan(q, kv)
        wanted, wanted_lse = wa.attention_paged(q, kv, mask=wa.Causal(), score=wa.SoftCap(5.0), return_lse=True)
        assert out is plan.out and torch.allclose(out, wanted, atol=1e-6) and torch.allclose(lse, wanted_lse)


def test_an_output_of_the_caller():
    q, kv = torch.randn(2, 1, 4, 16), cache()
    plan, out = wa.DecodePlan(q, kv), torch.full((2, 1, 4, 24), torch.nan)
    assert plan(q, kv, out) is out
    assert torch.allclose(out, wa.attention_paged(q, kv), atol=1e-6)


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (torch.empty(2, 1, 4, 23), r"out has shape \(2, 1, 4, 23\).*made for \(2, 1, 4, 24\)"),
        (torch.empty(1, 1, 4, 24), "out has shape"),
        (torch.empty(2, 1, 4, 24).half(), "torch.float16.*and torch.float32"),
        (torch.empty(2, 4, 1, 24).transpose(1, 2), "strides"),
        (torch.empty(1, 1, 4, 24).expand(2, 1, 4, 24), "strides"),
        ([1.0], "out is a list; out must be a torch.Tensor"),
    ],
)
def test_an_output_that_is_not_as_planned_is_refused(out, words):
    q, kv = torch.randn(2, 1, 4, 16), cache()
    with pytest.raises(wa.AttentionError, match=f"^{words}" if words.startswith("out") else words):
        wa.DecodePlan(q, kv)(q, kv, out)


def test_gradients_are_refused():
    q, kv = torch.randn(2, 1, 4, 16), cache()
    plan, asking = wa.DecodePlan(q, kv), q.clone().requires_grad_()
    for attempt in (lambda: plan(asking, kv), lambda: wa.DecodePlan(asking, kv)):
        with pytest.raises(wa.AttentionError, match="q requires a gradient; a plan has no backward"):
            attempt()
    with torch.no_grad():
        assert torch.equal(plan(asking, kv), plan(q, kv))


def ragged(*lengths: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, wa.Ragged]:
    """q, k, v of 4 and 2 heads, head dim 16, laid end to end."""
    total = sum(lengths)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return torch.randn(total, 4, 16), torch.randn(total, 2, 16), torch.randn(total, 2, 16), wa.Ragged(cu)


def test_a_prefill_plan_takes_fewer_rows():
    plan = wa.PrefillPlan(*ragged(20, 12), mask=wa.Causal(), return_lse=True)
    for lengths in ((20, 12), (3, 0), (1, 30)):
        inputs = ragged(*lengths)
        plan.out.fill_(torch.nan)
        out, lse = plan(*inputs)
        wanted, wanted_lse = wa.attention_varlen(*inputs, mask=wa.Causal(), return_lse=True)
        assert torch.allclose(out, wanted, atol=1e-6) and torch.allclose(lse, wanted_lse, atol=1e-6)
    with pytest.raises(wa.AttentionError, match="q has 40 and k 40 rows; the plan was made for up to"):
        plan(*ragged(20, 20))
    q, k, v, seq = ragged(3, 4)
    with pytest.raises(wa.AttentionError, match="v has 6 rows; v must have as many as k, 7"):
        plan(q, k, v[:6], seq)
    with pytest.raises(wa.AttentionError, match="out has 6 rows; out must have as many as q, 7"):
        plan(q, k, v, seq, torch.empty(6, 4, 16))
    with pytest.raises(wa.AttentionError, match=r"k has shape \(7, 1, 16\).*made for rows of \(2, 16\)"):
        plan(q, k[:, :1], v, seq)
    out = torch.empty(7, 4, 16)
    result, lse = plan(q, k, v, seq, out)
    assert result is out and lse.shape == (4, 7)
    assert torch.allclose(out, wa.attention_varlen(q, k, v, seq, mask=wa.Causal()), atol=1e-6)


def test_a_dense_cache():
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 30, 2, 16), torch.randn(2, 30, 2, 24)
    plan = wa.DecodePlan(q, (k, v), mask=wa.SlidingWindow(8), cache_settled=True)
    for _ in range(2):
        k = torch.randn_like(k)
        assert torch.allclose(plan(q, (k, v)), wa.attention(q, k, v, mask=wa.SlidingWindow(8)), atol=1e-6)
    with pytest.raises(wa.AttentionError, match="kv is a PagedKV; the plan was made for a pair of dense k and v"):
        plan(q, cache())
    with pytest.raises(wa.AttentionError, match="kv is a tuple; the plan was made for a PagedKV"):
        wa.DecodePlan(q, cache())(q, (k, v))
    with pytest.raises(wa.AttentionError, match="kv is a Tensor; it must be a PagedKV or a pair of dense k and v"):
        wa.DecodePlan(q, k)  # pyright: ignore[reportArgumentType]
    with pytest.raises(wa.AttentionError, match="k has shape"):
        plan(q, (k[:, :20], v))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, kv: (q[:, :, :2], kv), "q has shape"),
        (lambda q, kv: (q.half(), kv), "torch.float16"),
        (lambda q, kv: (q, wa.PagedKV(kv.k_pages[:5], kv.v_pages, kv.block_table, kv.lengths)), "k_pages has shape"),
        (lambda q, kv: (q, wa.PagedKV(kv.k_pages, kv.v_pages, kv.block_table[:, :2], kv.lengths)), "block_table has"),
        (lambda q, kv: (q, wa.PagedKV(kv.k_pages, kv.v_pages, kv.block_table, kv.lengths.long())), "torch.int64"),
    ],
)
def test_what_was_not_planned_is_refused(change, words):
    q, kv = torch.randn(2, 1, 4, 16), cache()
    plan = wa.DecodePlan(q, kv)
    with pytest.raises(wa.AttentionError, match="the plan was made for") as caught:
        plan(*change(q, kv))
    assert words in str(caught.value)
    assert str(caught.value).endswith(" on cpu")


@pytest.mark.parametrize("seq", [None, Sequence(), torch.tensor([0, 3]), wa.Dense])
def test_a_prefill_plan_takes_ragged_batches_only(seq):
    x, cu = torch.randn(3, 2, 16), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(wa.AttentionError, match=r"^seq is (an? \w+|None); seq must be a warpattn Ragged"):
        wa.PrefillPlan(x, x, x, seq)
    with pytest.raises(wa.AttentionError, match=r"^seq is (an? \w+|None); seq must be a warpattn Ragged"):
        wa.PrefillPlan(x, x, x, wa.Ragged(cu))(x, x, x, seq)


@pytest.mark.parametrize("name", ["batch_invariant", "kv_ready_before_dependency", "cache_settled", "return_lse"])
@pytest.mark.parametrize("value", ["no", None, 1])
def test_only_true_is_a_promise(name, value):
    q, kv = torch.randn(2, 1, 4, 16), cache()
    with pytest.raises(wa.AttentionError, match=f"^{name} is {value!r}; {name} must be True or False$"):
        wa.DecodePlan(q, kv, **{name: value})


@pytest.mark.parametrize("q", [None, [[1.0]], 3])
def test_queries_that_are_no_tensor(q):
    query, kv = torch.randn(2, 1, 4, 16), cache()
    with pytest.raises(wa.AttentionError, match=r"^q is (an? \w+|None); q must be a torch.Tensor$"):
        wa.DecodePlan(query, kv)(q, kv)
    inputs = ragged(3, 4)
    with pytest.raises(wa.AttentionError, match=r"^q is (an? \w+|None); q must be a torch.Tensor$"):
        wa.PrefillPlan(*inputs)(q, *inputs[1:])


def test_bad_input_is_refused_when_the_plan_is_made():
    q, kv = torch.randn(2, 1, 5, 16), cache()
    with pytest.raises(wa.AttentionError, match="multiple of the key heads"):
        wa.DecodePlan(q, kv)


def test_lengths_beyond_the_pages_are_refused_when_the_plan_is_made():
    kv = cache()
    kv.lengths[1] = 17
    with pytest.raises(wa.AttentionError, match=r"lengths\[1\] is 17"):
        wa.DecodePlan(torch.randn(2, 1, 4, 16), kv)


def test_plans_of_fp64_compute_in_it():
    q, k, v = (torch.randn(1, 5, 2, 16, dtype=torch.float64) for _ in range(3))
    exact, exact_lse = wa.attention(q, k, v, return_lse=True)
    out, lse = wa.DecodePlan(q, (k, v), return_lse=True)(q, (k, v))
    assert out.dtype == lse.dtype == torch.float64 and torch.equal(out, exact) and torch.equal(lse, exact_lse)
    seq = wa.Ragged(torch.tensor([0, 2, 5], dtype=torch.int32))
    exact = wa.attention_varlen(q[0], k[0], v[0], seq)
    assert torch.equal(wa.PrefillPlan(q[0], k[0], v[0], seq)(q[0], k[0], v[0], seq), exact)


@pytest.mark.parametrize("of_its_own", [False, True])
def test_a_prefill_plan_for_other_offsets(of_its_own):
    x, starts = torch.randn(5, 2, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    made, other = wa.Ragged(starts, starts if of_its_own else None), wa.Ragged(starts, None if of_its_own else starts)
    plan = wa.PrefillPlan(x, x, x, made)
    with pytest.raises(wa.AttentionError, match=r"^the call has seq\.cu_q.*; the plan was made for .*seq\.cu_"):
        plan(x, x, x, other)
    with pytest.raises(wa.AttentionError, match=r"seq\.cu_q has shape"):
        plan(x, x, x, wa.Ragged(starts[:2], starts[:2] if of_its_own else None))


def test_a_prefill_plan_keeps_its_bounds():
    x, starts = torch.randn(5, 2, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    plan = wa.PrefillPlan(x, x, x, wa.Ragged(starts, None, 3, 3))
    assert plan(x, x, x, wa.Ragged(starts, None, 3)).shape == x.shape
    with pytest.raises(wa.AttentionError, match=r"seq\.max_q is '2'; the plan was made for sequences of up to 3"):
        plan(x, x, x, wa.Ragged(starts, None, "2"))
    with pytest.raises(wa.AttentionError, match=r"seq\.max_q is 4; the plan was made for sequences of up to 3"):
        plan(x, x, x, wa.Ragged(starts, None, 4))
    longer = torch.tensor([0, 1, 5], dtype=torch.int32)  # which kernels would attend in part
    with pytest.raises(wa.AttentionError, match=r"seq\.max_q is 3; sequence 1 has 4 rows by seq\.cu_q"):
        plan(x, x, x, wa.Ragged(longer))
    apart = wa.PrefillPlan(x, x, x, wa.Ragged(starts, starts, None, 3))
    with pytest.raises(wa.AttentionError, match=r"seq\.max_k is 3; sequence 1 has 4 rows by seq\.cu_k"):
        apart(x, x, x, wa.Ragged(starts, longer))


@pytest.mark.parametrize("gaps", [(), ("seq.cu_q", "kv.lengths", "kv.block_table")], ids=["none", "all"])
def test_own_indices_are_laid_out_as_the_plan_was_made_for(gaps):
    """A step's strides must be the plan's, and views of the plan's own tensors may be what a step copies into them."""
    pages = pages_of()
    q, kv, seq = step((1, 1, 1), (30, 20, 9), pages)
    cu_q, lengths, table = [
        torch.stack([x, x], -1)[..., 0] if name in gaps else x
        for name, x in {"seq.cu_q": seq.cu_q, "kv.lengths": kv.lengths, "kv.block_table": kv.block_table}.items()
    ]
    plan = wa.StepPlan(q, kv.with_fields(lengths=lengths, block_table=table), wa.Ragged(cu_q))
    assert (plan.seq.cu_q.stride(), plan.kv.block_table.stride()) == (cu_q.stride(), table.stride())
    plan.update(seq.cu_q, kv.lengths, kv.block_table)
    torch.testing.assert_close(plan(q, plan.kv, plan.seq), wa.attention_paged(q, kv, seq))
    plan.update(plan.seq.cu_q[:3], plan.kv.lengths[1:], plan.kv.block_table[1:])
    later = kv.with_fields(lengths=kv.lengths[1:], block_table=kv.block_table[1:])
    wanted = wa.attention_paged(q[:2], later, wa.Ragged(seq.cu_q[:3]))
    torch.testing.assert_close(plan(q, plan.kv, plan.seq)[:2], wanted)
    assert plan.kv.lengths.tolist() == [20, 9, 0]


@pytest.mark.parametrize("name", ["kv.lengths", "kv.block_table"])
def test_expanded_indices_have_no_place_for_those_of_a_step(name):
    q, kv, seq = step((1, 1), (30, 30), pages_of())
    field = name.removeprefix("kv.")
    first = getattr(kv, field)[:1]
    plan = wa.StepPlan(q, kv.with_fields(**{field: first.expand(2, *first.shape[1:])}), seq)
    rule = "steps write different numbers into the plan's own, so make the plan with a contiguous tensor"
    with pytest.raises(wa.AttentionError, match=rf"^{name} has shape \(2.* and strides \(0.*\); {rule}$"):
        plan.update(seq.cu_q, kv.lengths, kv.block_table)
