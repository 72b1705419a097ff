"""append_paged on a card: the kernel of its architecture, then only addresses for calls like one before.

CPU tensors stand in for a card's, so `append._launch` is called where a card's would come to it.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.unit.runtime.test_dispatch import Driver, driver, half  # noqa: F401  a fixture
from warpattn.problem.arch import ARCHS
from warpattn.problem.backends import Chip
from warpattn.runtime import bound_launches, cuda, hip
from warpattn.serving import append

LENGTHS = torch.tensor([3, 5], dtype=torch.int32)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(append, "_known", {})
    monkeypatch.setattr(append, "chip_of", lambda device: Chip("sm90", "sm90"))


def tensors(rotated: bool = False, page: int = 4) -> append.Tensors:
    angles = (torch.randn(16, 8), torch.randn(16, 8)) if rotated else (None, None)
    table = torch.arange(4, dtype=torch.int32).reshape(2, 2)
    k_pages, v_pages, k_new, v_new = half(6, page, 2, 16), half(6, page, 2, 16), half(2, 1, 2, 16), half(2, 1, 2, 16)
    return k_pages, v_pages, table, LENGTHS.clone(), k_new, v_new, *angles


def call(x: append.Tensors, interleaved: bool = False) -> None:
    """The public function; on the CPU it writes into the pages, unless the call is known."""
    wa.append_paged(*x[:6], cos=x[6], sin=x[7], interleaved=interleaved)


def launched_with(monkeypatch) -> list[list[int]]:
    """What 8-byte parameters hold, launch by launch."""
    found = []

    def launch_call(*arguments, pdl=False):
        table = arguments[-1]
        return lambda stream: found.append([ctypes.c_uint64.from_address(at).value for at in table]) or 0

    monkeypatch.setattr(cuda, "launch_call", launch_call)
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_a_card_gets_the_kernel_of_its_architecture(arch, driver, monkeypatch):  # noqa: F811
    on_amd = []
    monkeypatch.setattr(append, "chip_of", lambda device: Chip(arch, arch))
    monkeypatch.setattr(hip, "launch", lambda step, device: on_amd.append(step.name))
    append._launch(tensors(), False)
    loaded = [key[1] for key in bound_launches._loaded if isinstance(key, tuple)]
    assert on_amd + loaded == [f"{arch}.append"] and len(on_amd) + len(driver.launches) == 1
    assert len(append._known) == len(driver.launches), "what HIP launches is not kept"


@pytest.mark.parametrize("rotated", [False, True])
def test_a_call_like_one_before_only_writes_addresses(rotated, driver, monkeypatch):  # noqa: F811
    seen = launched_with(monkeypatch)
    first, other = tensors(rotated), tensors(rotated)
    append._launch(first, False)
    monkeypatch.setattr(append, "append_launches", None)  # nothing is planned again
    monkeypatch.setattr(append, "_check_shapes", None)
    call(other)
    call(first)
    assert len(seen) == 3
    for x, parameters in zip((first, other, first), seen, strict=True):
        assert {tensor.data_ptr() for tensor in x if tensor is not None} <= set(parameters)
        others = {tensor.data_ptr() for tensor in (other if x is first else first) if tensor is not None}
        assert not others & set(parameters)


UNLIKE = {
    "page size": lambda x: tensors(page=8),
    "strides": lambda x: (x[0].transpose(1, 2).contiguous().transpose(1, 2), *x[1:]),
    "dtype": lambda x: (*(t.half() if t.dtype == torch.bfloat16 else t for t in x[:6]), None, None),
    "rotated": lambda x: tensors(rotated=True),
    "a parameter": lambda x: (*x[:4], torch.nn.Parameter(x[4], requires_grad=False), *x[5:]),
}


@pytest.mark.parametrize("change", UNLIKE)
def test_another_call_goes_the_long_way(change, driver):  # noqa: F811
    first = tensors()
    append._launch(first, False)
    call(UNLIKE[change](first))
    assert len(driver.launches) == 1


def test_another_device_or_order_of_pairs_goes_the_long_way(driver, monkeypatch):  # noqa: F811
    x = tensors(rotated=True)
    append._launch(x, False)
    call(x, interleaved=True)
    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    call(x)
    assert len(driver.launches) == 1


def test_what_the_rules_refuse_is_refused_again(driver):  # noqa: F811
    x = tensors()
    append._launch(x, False)
    with pytest.raises(wa.AttentionError, match="interleaved is 0; interleaved must be True or False"):
        call(x, interleaved=0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(wa.AttentionError, match="k_new requires a gradient"):
        call((*x[:4], x[4].requires_grad_(), *x[5:]))
    with pytest.raises(wa.AttentionError, match="v_new is a list"):
        call((*x[:5], [], *x[6:]))  # pyright: ignore[reportArgumentType]
    assert len(driver.launches) == 1


def test_one_tensor_for_two_is_launched_and_not_kept(driver):  # noqa: F811
    x = tensors()
    append._launch((*x[:4], x[4], x[4], None, None), False)
    assert len(driver.launches) == 1 and not append._known


def test_as_many_are_kept_as_fit(driver, monkeypatch):  # noqa: F811
    monkeypatch.setattr(append, "KEPT", 2)
    for page in (4, 8, 16):
        append._launch(tensors(page=page), False)
    assert len(driver.launches) == 3 and len(append._known) == 1
