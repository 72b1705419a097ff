"""Merging in the simulator: the kernel against torch on every architecture, and cascade attention."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import left_out
from warpattn.kernels.merge.launch import Result, merge_launches
from warpattn.problem.arch import ARCHS
from warpattn.runtime import simulate
from warpattn.runtime.merging import cascade
from warpattn.runtime.simulate import Options, run_launch

PAGE, SHARED = 16, 2


def results(shape: tuple[int, ...], dtype: torch.dtype, count: int) -> list[Result]:
    """Random results with NaN, -inf and rows that no part saw among the LSEs, in tensors with gaps between rows."""
    torch.manual_seed(0)
    *outer, heads, _ = shape
    lse_shape = (heads, *outer) if len(shape) == 3 else (outer[0], heads, outer[1])
    made = []
    for i in range(count):
        out = torch.randn(*shape[:-1], shape[-1] + 8).to(dtype)[..., : shape[-1]]
        lse = 9 * torch.randn(lse_shape)
        lse[..., 0] = -math.inf  # a row that no part saw
        lse[..., 1, 1] = math.nan if i == 1 else 0.0
        if i == 0:
            lse[..., 2] = -math.inf
            out.transpose(-2, -3)[..., 2, :] = math.nan
        made.append(Result(out, lse))
    return made


CASES = {"dense": ((2, 3, 5, 40), torch.bfloat16, 3), "ragged": ((7, 4, 128), torch.float16, 2),
         "odd": ((4, 3, 5), torch.float32, 1)}  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES)
def test_kernel(case, arch):
    given = results(*CASES[case])
    expected = wa.merge_states(given)
    merged = Result(*(torch.full(x.shape, 7.0, dtype=x.dtype) for x in expected))
    (launch,) = merge_launches(arch, given, merged)
    report = run_launch(launch, Options("adversarial"))
    assert report.clean, report
    torch.testing.assert_close(merged.out, expected[0], equal_nan=True)
    torch.testing.assert_close(merged.lse, expected[1], equal_nan=True)


@pytest.mark.parametrize("count", [0, 5, 7])
def test_rows_that_do_not_count_stay(count):
    given = results(*CASES["ragged"])
    expected = wa.merge_states(given)
    merged = Result(*(torch.full(x.shape, 7.0, dtype=x.dtype) for x in expected))
    (launch,) = merge_launches("sm90", given, merged, torch.tensor([count], dtype=torch.int32))
    assert run_launch(launch, Options("adversarial")).clean
    torch.testing.assert_close(merged.out[:count], expected[0][:count], equal_nan=True)
    torch.testing.assert_close(merged.lse[:, :count], expected[1][:, :count], equal_nan=True)
    assert (merged.out[count:] == 7).all() and (merged.lse[:, count:] == 7).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_outputs_whose_columns_are_apart(arch):
    """The kernel reads rows in one piece, so it gets copies of them."""
    given = results(*CASES["dense"])
    expected = wa.merge_states(given)
    apart = [(out.transpose(1, 3).contiguous().transpose(1, 3), lse) for out, lse in given]
    assert all(out.stride(-1) != 1 for out, _ in apart)
    found = wa.merge_states(apart, backend=f"simulate:{arch}")
    torch.testing.assert_close(found, expected, equal_nan=True)


def shared_prefix(ragged: bool):
    """(q, kv, seq) of three sequences with two pages in common."""
    torch.manual_seed(0)
    table = torch.tensor([[3, 1, 5, 6], [3, 1, 8, 9], [3, 1, 2, 4]], dtype=torch.int32)
    pages = [torch.randn(10, PAGE, 2, 64).bfloat16() for _ in range(2)]
    lengths = torch.tensor([SHARED * PAGE + n for n in (3, 20, 31)], dtype=torch.int32)
    kv = wa.PagedKV(*pages, table, lengths, shared_pages=SHARED)
    if ragged:
        return torch.randn(7, 4, 64).bfloat16(), kv, wa.Ragged(torch.tensor([0, 1, 5, 7]).int(), max_q=4)
    return torch.randn(3, 2, 4, 64).bfloat16(), kv, None


@pytest.fixture
def launches(monkeypatch):
    """Names of the launches that are simulated."""
    names, run = [], simulate.run_launch

    def noted(launch, options):
        names.append(launch.name)
        return run(launch, options)

    monkeypatch.setattr(simulate, "run_launch", noted)
    return names


@pytest.mark.parametrize(
    ("arch", "ragged"),
    [("gfx942", False), left_out(("sm90", True)), left_out(("sm90", False)), left_out(("sm100", False))],
)
def test_cascade(arch, ragged, launches):
    """The shared pages are read once, sinks count once, and the result is that of every sequence on its own."""
    q, kv, seq = shared_prefix(ragged)
    tail = {"mask": wa.Causal(), "sinks": torch.randn(4), "score": wa.SoftCap(5.0), "return_lse": True}
    out = torch.empty_like(q)
    found = wa.attention_paged(q, kv, seq, out=out, backend=f"simulate:{arch}", **tail)
    assert found[0] is out and launches[-1] == f"{arch}.merge"
    exact = wa.PagedKV(kv.k_pages.float(), kv.v_pages.float(), kv.block_table, kv.lengths)
    expected = wa.attention_paged(q.float(), exact, seq, **tail)
    torch.testing.assert_close(found[0].float(), expected[0], atol=8e-3, rtol=1e-2)
    torch.testing.assert_close(found[1], expected[1])


def test_shared_pages_are_those_of_sequences_with_queries():
    """The first has none, and other pages; where those with queries begin with other pages, the simulator says so."""
    q, kv, _ = shared_prefix(ragged=True)
    kv = kv.with_fields(block_table=torch.where(torch.arange(3)[:, None] > 0, kv.block_table, 0).int())
    seq, exact = wa.Ragged(torch.tensor([0, 0, 5, 7]).int()), kv.with_fields(shared_pages=0)
    found = wa.attention_paged(q, kv, seq, backend="simulate:gfx942")
    torch.testing.assert_close(found, wa.attention_paged(q, exact, seq), atol=2e-2, rtol=1e-2)
    with pytest.raises(wa.AttentionError, match="sequences 0 and 1 begin with other pages"):
        wa.attention_paged(q, kv, wa.Ragged(torch.tensor([0, 1, 5, 7]).int()), backend="simulate:gfx942")


OTHERS = {
    "window": {"mask": wa.SlidingWindow(9)},
    "top left": {"mask": wa.Causal(top_left=True)},
    "alibi": {"score": wa.ALiBi(torch.ones(4))},
    "given elsewhere": {"out": torch.empty(3, 2, 4, 128).bfloat16()[..., ::2]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_calls_whose_result_depends_on_positions_are_not_cut(name, monkeypatch):
    """They read every sequence's own pages; so do calls with gradients."""
    q, kv, _ = shared_prefix(ragged=False)
    attended = []
    monkeypatch.setattr(cascade, "attend", attended.append)
    call = cascade.Call(q, kv.k_pages, kv.v_pages, kv, backend="simulate:sm90", **OTHERS[name])
    assert cascade.cascaded(call) is None
    call = cascade.Call(q.requires_grad_(), kv.k_pages, kv.v_pages, kv, backend="simulate:sm90")
    assert cascade.cascaded(call) is None and not attended
