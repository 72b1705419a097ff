"""What Triton refuses to compile ends in one sentence, with Triton's own lines as the cause."""

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.compiler.errors import CompilationError
from triton.errors import TritonError
from triton.runtime.errors import PTXASError

import warpattn as wa
from tests.launches import small_call
from warpattn.kernels.pieces import codegen
from warpattn.runtime import simulate
from warpattn.runtime.compiler import compiled, refusals_named
from warpattn.runtime.launches import list_launches


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
                         (TritonError(), "TritonError"),
                         (RuntimeError("PassManager::run failed"), "PassManager::run failed"),
                         (RecursionError("maximum recursion depth exceeded"), "maximum recursion depth exceeded")]
)  # fmt: skip
def test_the_last_line_is_the_reason(error, words):
    said = f"^sm90.decode cannot be compiled; Triton says: {words}$"
    with pytest.raises(wa.AttentionError, match=said), refusals_named("sm90.decode"):
        raise error


@pytest.mark.parametrize(
    ("owner", "name", "compile_it"), [(simulate, "to_ttgir", simulate._kernel), (triton, "compile", compiled)]
)
def test_a_pass_of_the_compiler_that_fails(owner, name, compile_it, monkeypatch):
    """On both ways: to the simulator, and to machine code."""

    def failing(*_, **__):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(owner, name, failing)
    monkeypatch.setattr(simulate, "_compiled", {})
    (launch,) = list_launches(*small_call("sm90", (64, 64)))
    with pytest.raises(wa.AttentionError, match=r"^sm90.prefill cannot be compiled; Triton says: PassManager::run"):
        compile_it(launch)


def test_other_errors_pass():
    with pytest.raises(KeyError), refusals_named("sm90.decode"):
        raise KeyError("a bug")
