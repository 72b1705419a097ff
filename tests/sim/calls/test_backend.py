"""`backend="simulate:sm90"`: attention on CPU tensors by the Hopper kernel in the simulator."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn
from warpattn.reference import reference
from warpattn.runtime import simulate
from warpattn.sim import Finding, Report

BACKEND = "simulate:sm90"


def tensors(seq=150, dim=64, dtype=torch.float16, heads=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, seq, heads, dim, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", drawn([torch.float16, torch.bfloat16], [torch.float16]))
def test_values(dtype):
    q, k, v = tensors(dtype=dtype)
    mask = wa.Causal() & wa.SlidingWindow(40)
    out, lse = wa.attention(q, k, v, mask=mask, return_lse=True, backend=BACKEND)
    expected, expected_lse = reference(q, k, v, mask=mask)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=2e-2 if dtype == torch.bfloat16 else 3e-3, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=0)


def test_a_b300_runs_code_of_its_own():
    q, k, v = tensors()
    out = wa.attention(q, k, v, mask=wa.Causal(), backend="simulate:sm103")
    torch.testing.assert_close(out.float(), reference(q, k, v, mask=wa.Causal())[0], atol=3e-3, rtol=0)
    texts = [kernel.asm["ttgir"] for key, kernel in simulate._compiled.items() if "sm103" in key]  # type: ignore[operator]
    assert texts and all('"cuda:103"' in text for text in texts)


def test_captured_tensors_sinks_and_grouped_heads():
    q, k, v = tensors(heads=4)
    k, v = k[:, :, :2], v[:, :, :2]
    options = {"mask": wa.Padding(torch.tensor([150, 70])), "score": wa.ALiBi(4), "sinks": torch.randn(4)}
    out = wa.attention(q, k, v, backend=BACKEND, **options)
    torch.testing.assert_close(out.float(), reference(q, k, v, **options)[0], atol=3e-3, rtol=0)


def test_tensors_that_tma_cannot_address():
    q, k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in tensors())
    out = torch.full((2, 150, 2, 65), float("nan"), dtype=q.dtype)[..., 1:]
    assert wa.attention(q, k, v, out=out, backend=BACKEND) is out
    torch.testing.assert_close(out.float(), reference(q, k, v)[0], atol=3e-3, rtol=0)


def test_without_keys():
    q, k, v = tensors()
    out, lse = wa.attention(q, k[:, :0], v[:, :0], return_lse=True, backend=BACKEND)
    assert not out.any() and (lse == -torch.inf).all()
    sinks = torch.tensor([torch.nan, torch.inf])
    out, lse = wa.attention(q, k[:, :0], v[:, :0], sinks=sinks, return_lse=True, backend=BACKEND)
    assert out.isnan().all() and lse.isnan().all()


def test_what_it_does_not_take_is_one_error():
    q, k, v = tensors(dtype=torch.float32, dim=520)
    with pytest.raises(wa.AttentionError) as caught:
        wa.attention(q, k, v, backend=BACKEND)
    assert len(caught.value.reasons) == 2  # dtype, head dims
    meta = [x.to("meta") for x in tensors()]
    with pytest.raises(wa.AttentionError, match="q is on the device meta"):
        wa.attention(*meta, backend=BACKEND)
    q, k, v = tensors(dim=136)
    with pytest.raises(wa.AttentionError, match="q requires a gradient; the backward of the gfx942 backend takes"):
        wa.attention(q.requires_grad_(), k, v, backend="simulate:gfx942")


def test_findings_are_an_error(monkeypatch):
    found = Report([Finding("Race", "a reads what b writes"), Finding("Deadlock", "nobody can go on")])
    monkeypatch.setattr(simulate, "simulate", lambda *_, **__: found)
    with pytest.raises(wa.AttentionError, match="2 findings: Race: a reads") as caught:
        wa.attention(*tensors(), backend=BACKEND)
    assert len(caught.value.reasons) == 2


def test_lengths_are_checked():
    with pytest.raises(wa.AttentionError, match=r"within 0 \.\. 150"):
        wa.attention(*tensors(), mask=wa.Padding(torch.tensor([150, 151])), backend=BACKEND)


def test_threads_compile_one_after_the_other(monkeypatch):
    """Python's parser fails in two threads at once, and a kernel is compiled once."""
    inside, most, compile_one = [], [], simulate.to_ttgir

    def noted(*args):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return compile_one(*args)

    monkeypatch.setattr(simulate, "to_ttgir", noted)
    monkeypatch.setattr(simulate, "_compiled", {})
    q = torch.randn(1, 8, 1, 32).half()
    masks = [wa.SlidingWindow(3), wa.SlidingWindow(4), wa.SlidingWindow(4)]
    calls = [lambda mask=mask: wa.attention(q, q, q, mask=mask, backend="simulate:gfx942") for mask in masks]
    with ThreadPoolExecutor(3) as pool:
        [found.result() for found in [pool.submit(call) for call in calls]]
    assert most == [1, 1]


# What of a call's kernel is taken out, and the memory that it then does not leave at 0.
RESETS = {
    "counter_ptr": (150, 150, r"\n[^\n]*= tt\.atomic_rmw exch, [^\n]*"),
    "workspace.tickets": (1, 900, r"\n *tt\.store %ticket\w*, %c0_i32[^\n]*"),
}


@pytest.mark.parametrize("name", RESETS)
def test_counters_are_0_again(name, monkeypatch):
    queries, keys, reset = RESETS[name]
    compile_one = simulate.to_ttgir

    def without(*args):
        made = compile_one(*args)
        text, count = re.subn(reset, "", made.asm["ttgir"])
        return replace(made, asm={"ttgir": text}) if count else made

    q, k, v = torch.randn(1, queries, 2, 64), torch.randn(1, keys, 2, 64), torch.randn(1, keys, 2, 64)
    call = [x.half() for x in (q, k, v)]
    wa.attention(*call, backend=BACKEND)
    monkeypatch.setattr(simulate, "to_ttgir", without)
    monkeypatch.setattr(simulate, "_compiled", {})
    with pytest.raises(wa.AttentionError, match=rf"NotReset: sm90\.\w+ leaves \d+ in element 0 of {re.escape(name)}"):
        wa.attention(*call, backend=BACKEND)
