"""Gradients of what a score captured, by the simulated kernels: every kind of index, without findings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn, left_out
from warpattn.problem import Call, validate
from warpattn.problem.backward import CheckedBackward, Gradients
from warpattn.reference import reference
from warpattn.runtime.training.captured import captured_gradients
from warpattn.scores import CustomScore, Score
from warpattn.sequences import Dense

ROWS, HEADS = 150, 2

def bucketed(s, b, h, q, k, t):
    return s + t[h, wa.minimum((q - k) // 40, 3)]


SCORES: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], Score]]] = {
    "bias": ((ROWS, ROWS), wa.Bias),
    "bias of heads": ((HEADS, ROWS, ROWS), wa.Bias),
    "slopes": ((HEADS,), wa.ALiBi),
    "keys": ((HEADS, ROWS), lambda t: CustomScore(lambda s, b, h, q, k, t: s + t[h, k], t=t)),
    "rows": ((HEADS, ROWS), lambda t: CustomScore(lambda s, b, h, q, k, t: s * t[h, q], t=t)),
    "distances": ((2 * ROWS,), lambda t: CustomScore(lambda s, b, h, q, k, t: s + t[q - k + 100], t=t)),  # some outside
    "number": ((), lambda t: CustomScore(lambda s, b, h, q, k, t: s * t[()], t=t)),
    "buckets": ((HEADS, 4), lambda t: CustomScore(bucketed, t=t)),
}


CASES = [(arch, name, False, 64, 64) for arch in ("sm90", "sm100") for name in SCORES]
CASES += [(arch, "rows", True, 64, 64) for arch in ("sm90", "sm100")]
CASES += [("sm90", "slopes", False, 192, 192), ("sm90", "keys", False, 192, 128)]
CASES += [("sm100", "bias of heads", False, 192, 192), ("sm100", "buckets", True, 256, 256)]
DRAWN = [
    ("sm90", "buckets", False, 64, 64), ("sm90", "rows", True, 64, 64), ("sm100", "rows", True, 64, 64),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "name", "ragged", "dim", "dim_v"), drawn(CASES, DRAWN))
def test_captured_gradients(arch, name, ragged, dim, dim_v):
    """Of the reference's outputs and LSEs: those of a kernel have a rounding of their own, which all pairs of a row
    share, so that it does not average out."""
    generator = torch.Generator().manual_seed(0)
    shape, score_of = SCORES[name]
    captured = torch.rand(shape, generator=generator)  # slopes are positive
    sizes = ((HEADS, dim), (1, dim), (1, dim_v), (HEADS, dim_v))
    q, k, v, dout = (torch.randn(1, ROWS, *size, generator=generator).bfloat16() for size in sizes)
    dlse, sequence = torch.randn(1, HEADS, ROWS, generator=generator), Dense()
    if ragged:
        sequence = wa.Ragged(torch.tensor([0, 60, ROWS], dtype=torch.int32))
        q, k, v, dout, dlse = (x[0] for x in (q, k, v, dout, dlse))
    leaf = captured.double().requires_grad_()
    options = {"mask": wa.Causal(), "score": score_of(leaf), "dtype": torch.float64, "sequence": sequence}
    out, lse = reference(q.double(), k.double(), v.double(), **options)
    (expected,) = torch.autograd.grad((out, lse), leaf, (dout.double(), dlse.double()))
    call = Call(q, k, v, sequence, wa.Causal(), score_of(captured), return_lse=True, backend=f"simulate:{arch}")
    x = Gradients(q, k, v, out.detach().bfloat16(), lse.detach().float(), dout, dlse, None, q, k, v, None)
    (found,) = captured_gradients(CheckedBackward.of(validate(call), False), sequence, x, (True,))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("arch", ["gfx950", left_out("sm90")])
def test_tensors_without_dimensions(arch):
    """A mask and a score read one; what the score reads has a gradient."""
    q, k, v = (torch.randn(1, n, 2, 16).half() for n in (20, 40, 40))
    found = []
    for backend in ("reference", f"simulate:{arch}"):
        t = torch.tensor(0.7, requires_grad=True)
        mask = wa.CustomMask(lambda b, h, q, k, t: k >= t[()], t=torch.tensor(3))
        score = CustomScore(lambda s, b, h, q, k, t: s * t[()] + t[()] * k, t=t)
        out = wa.attention(q, k, v, mask=mask, score=score, backend=backend)
        found.append((out, *torch.autograd.grad(out.sum(), t)))
    (expected, of_t), (out, mine) = found
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(mine, of_t, atol=2e-3, rtol=2e-3)
    with pytest.raises(wa.AttentionError, match=r"as a keyword argument and read its number as name\[\(\)\]"):
        CustomScore(lambda s, b, h, q, k, t: s * t, t=t).program()
