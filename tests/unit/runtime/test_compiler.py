"""What Triton refuses to compile ends in one sentence, with Triton's own lines as the cause."""

import pytest
import torch

pytest.importorskip("triton")

from triton.compiler.errors import CompilationError
from triton.errors import TritonError
from triton.runtime.errors import PTXASError

import warpattn as wa
from warpattn.kernels.pieces import codegen
from warpattn.runtime.compiler import refusals_named


def test_a_mask_that_cannot_be_compiled(monkeypatch):
    monkeypatch.setitem(codegen._CALLS, "log", "gl.to_tensor(2**70)")
    q = torch.randn(1, 64, 1, 64, dtype=torch.bfloat16)
    mask = wa.CustomMask(lambda b, h, q, k: wa.log(wa.to_float(k)) < 2.0)
    with pytest.raises(wa.AttentionError) as refused:
        wa.attention(q, q, q, mask=mask, backend="simulate:sm90")
    said = "sm90.prefill cannot be compiled; Triton says: "
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value.__cause__, CompilationError)


@pytest.mark.parametrize(
    ("error", "words"), [(PTXASError("fatal\nregister allocation failed"), "register allocation failed"),
                         (TritonError(), "TritonError")]
)  # fmt: skip
def test_the_last_line_is_the_reason(error, words):
    said = f"^sm90.decode cannot be compiled; Triton says: {words}$"
    with pytest.raises(wa.AttentionError, match=said), refusals_named("sm90.decode"):
        raise error


def test_other_errors_pass():
    with pytest.raises(KeyError), refusals_named("sm90.decode"):
        raise KeyError("a bug")
