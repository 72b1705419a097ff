"""append_paged and append_slots on a card: the kernel of its architecture, then only addresses for calls like before.

CPU tensors stand in for a card's, so the launch of `RepeatedCalls` is called where a card's would come to it.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.unit.runtime.test_dispatch import Driver, driver, half  # noqa: F401  a fixture
from warpattn.kernels.cache.launch import NewRows, append_launches, slot_launches
from warpattn.problem.arch import ARCHS
from warpattn.problem.backends import Chip
from warpattn.runtime import bound_launches, cuda, hip, repeated_calls
from warpattn.sequences import PagedKV
from warpattn.serving import append, slots

LENGTHS = torch.tensor([3, 5], dtype=torch.int32)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(append._calls, "_known", {})
    monkeypatch.setattr(slots._calls, "_known", {})
    monkeypatch.setattr(repeated_calls, "chip_of", lambda device: Chip("sm90", "sm90"))


def tensors(rotated: bool = False, page: int = 4) -> tuple:
    """Pages, table, lengths, new tokens, angles: the arguments of append_paged."""
    angles = (torch.randn(16, 8), torch.randn(16, 8)) if rotated else (None, None)
    table = torch.arange(4, dtype=torch.int32).reshape(2, 2)
    k_pages, v_pages, k_new, v_new = half(6, page, 2, 16), half(6, page, 2, 16), half(2, 1, 2, 16), half(2, 1, 2, 16)
    return k_pages, v_pages, table, LENGTHS.clone(), k_new, v_new, *angles


def launch(x: tuple, interleaved: bool = False) -> None:
    """What a card's call does after its rules."""
    k_pages, v_pages, table, lengths, k_new, v_new, cos, sin = x
    new = NewRows(k_new, v_new, None if cos is None else (cos, sin), interleaved)
    kv = PagedKV(k_pages, v_pages, table, lengths)
    ordered = (k_pages, v_pages, k_new, v_new, table, lengths, cos, sin, None, None)
    append._calls.launch(ordered, interleaved, lambda arch: append_launches(arch, kv, new))


def call(x: tuple, interleaved: bool = False) -> None:
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
    monkeypatch.setattr(repeated_calls, "chip_of", lambda device: Chip(arch, arch))
    monkeypatch.setattr(hip, "ARCHS", ())  # one stand-in driver for all
    launch(tensors())
    loaded = [key[1] for key in bound_launches._loaded if isinstance(key, tuple)]
    assert loaded == [f"{arch}.append"] and len(driver.launches) == len(append._calls._known) == 1


@pytest.mark.parametrize("rotated", [False, True])
def test_a_call_like_one_before_only_writes_addresses(rotated, driver, monkeypatch):  # noqa: F811
    seen = launched_with(monkeypatch)
    first, other = tensors(rotated), tensors(rotated)
    launch(first)
    monkeypatch.setattr(append, "append_launches", None)  # nothing is planned again
    monkeypatch.setattr(append, "_check_shapes", None)
    call(other)
    call(first)
    assert len(seen) == 3
    for x, parameters in zip((first, other, first), seen, strict=True):
        assert {tensor.data_ptr() for tensor in x if tensor is not None} <= set(parameters)
        others = {tensor.data_ptr() for tensor in (other if x is first else first) if tensor is not None}
        assert not others & set(parameters)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch imports decompositions
def test_a_forward_mode_tangent_is_refused_where_a_kernel_would_run(driver):  # noqa: F811
    *cache, k_new, v_new, _, _ = tensors()
    launch((*cache, k_new, v_new, None, None))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v_new, v_new)
        with pytest.raises(wa.AttentionError, match=r"^v_new carries a forward-mode tangent; append_paged has no"):
            launch((*cache, k_new, dual, None, None))
        ordered = (*cache[:2], dual, v_new, cache[3], None, None, None, None, None)
        with pytest.raises(wa.AttentionError, match=r"^k carries a forward-mode tangent; append_slots has no"):
            slots._calls.launch(ordered, False, lambda arch: ())
    assert len(driver.launches) == 1


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
    launch(first)
    call(UNLIKE[change](first))
    assert len(driver.launches) == 1


def test_another_device_or_order_of_pairs_goes_the_long_way(driver, monkeypatch):  # noqa: F811
    x = tensors(rotated=True)
    launch(x)
    call(x, interleaved=True)
    monkeypatch.setattr(cuda, "current_device", lambda: 1)
    call(x)
    assert len(driver.launches) == 1


def test_what_the_rules_refuse_is_refused_again(driver):  # noqa: F811
    x = tensors()
    launch(x)
    with pytest.raises(wa.AttentionError, match="interleaved is 0; interleaved must be True or False"):
        call(x, interleaved=0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(wa.AttentionError, match="k_new requires a gradient"):
        call((*x[:4], x[4].requires_grad_(), *x[5:]))
    with pytest.raises(wa.AttentionError, match="v_new is a list"):
        call((*x[:5], [], *x[6:]))  # pyright: ignore[reportArgumentType]
    assert len(driver.launches) == 1


def test_one_tensor_for_two_is_launched_and_not_kept(driver):  # noqa: F811
    x = tensors()
    launch((*x[:4], x[4], x[4], None, None))
    assert len(driver.launches) == 1 and not append._calls._known


def test_as_many_are_kept_as_fit(driver, monkeypatch):  # noqa: F811
    monkeypatch.setattr(repeated_calls, "KEPT", 2)
    for page in (4, 8, 16):
        launch(tensors(page=page))
    assert len(driver.launches) == 3 and len(append._calls._known) == 1


def test_rows_that_no_vector_fits_go_the_long_way(driver):  # noqa: F811
    """The same shapes at another alignment are another kernel."""
    x = tensors()
    launch(x)
    shifted = torch.empty(x[4].numel() + 1, dtype=x[4].dtype)[1:].view(x[4].shape).copy_(x[4])
    call((*x[:4], shifted, *x[5:]))
    assert len(driver.launches) == 1
    launch((*x[:4], shifted, *x[5:]))
    call((*x[:4], shifted, *x[5:]))
    assert len(driver.launches) == 3 and len(append._calls._known) == 2


def test_slots_are_launched_again(driver, monkeypatch):  # noqa: F811
    seen = launched_with(monkeypatch)
    k_pages, v_pages, k, v = half(6, 4, 2, 16), half(6, 4, 2, 16), half(3, 2, 16), half(3, 2, 16)
    first, other = torch.tensor([0, -1, 9]), torch.tensor([4, 5, -1])
    ordered = (k_pages, v_pages, k, v, first, None, None, None, None, None)
    new = NewRows(k, v, None, False)
    slots._calls.launch(ordered, False, lambda arch: slot_launches(arch, (k_pages, v_pages), first, None, new))
    wa.append_slots(k, v, k_pages, v_pages, other)
    assert len(seen) == 2 and other.data_ptr() in seen[1] and first.data_ptr() not in seen[1]
    wa.append_slots(k, v, k_pages, v_pages, other.int())  # another dtype, on the CPU by torch
    assert len(seen) == 2
