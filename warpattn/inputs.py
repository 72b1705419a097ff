"""Decides whether arguments are usable tensors and numbers; all code that checks arguments calls these functions.

    tensor_fault(x)    None for a plain tensor with values; else what x is instead, and the rule it breaks
    number(x)          x as a Python number, also from NumPy scalars and tensors without dimensions; None if it is none
    kind_of(x)         x as text for an error message
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]

from warpattn.torch_modes import is_fake

_PLAIN = (Tensor, torch.nn.Parameter)
_LONGEST = 120  # most characters of a value in a message


class Fault(NamedTuple):
    """Why attention cannot read a value as a tensor: what it is ("is a ..."), and the rule it breaks."""

    what: str
    rule: str


def tensor_fault(value: object) -> Fault | None:
    """Return why attention cannot read `value` as a tensor; None if it can."""
    if not isinstance(value, Tensor):
        rule = "must be a torch.Tensor"
        made = " (torch.from_numpy makes one)" if type(value).__module__ == "numpy" else ""
        return Fault(f"is {of_type(value)}", rule + made)
    if value.is_nested:
        return Fault("is a nested tensor", "must be a dense (strided) tensor; Ragged takes sequences of any length")
    kind = type(value)
    if kind not in _PLAIN and not is_fake(value) and _has_own_meaning(kind):
        return Fault(f"is {of_type(value)}", "must be a plain torch.Tensor; what this subclass means is not known")
    if value.layout != torch.strided:
        return Fault(f"has layout {value.layout}", "must be a dense (strided) tensor")
    if value.device.type == "meta":
        return Fault("is on the device meta (for shapes use torch's FakeTensorMode)", "must have values")
    if torch.jit.is_tracing():  # it would keep what this call does for the values and the shape of this example
        return Fault("is recorded by torch.jit.trace", "must be read as it is: use torch.export or torch.compile")
    if _is_behind(value, functorch.is_batchedtensor):
        return Fault("is a tensor of torch.vmap", "must have values of its own: write a dimension of the batch instead")
    if _is_behind(value, functorch.is_functionaltensor):
        return Fault("is a tensor of torch.func.functionalize", "must have values of its own: call attention outside")
    if value.is_neg() or value.is_conj():
        bit, call = ("negative", "resolve_neg") if value.is_neg() else ("conjugate", "resolve_conj")
        return Fault(f"has its {bit} bit set", f"must hold its own values: pass the result of .{call}()")
    return None


def _is_behind(x: Tensor, of_transform: Callable[[Tensor], bool]) -> bool:
    """Whether a torch.func transform that `of_transform` recognises wraps a tensor; transforms may be nested."""
    while functorch.is_functorch_wrapped_tensor(x):
        if of_transform(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def _has_own_meaning(kind: Any) -> bool:
    """Whether a subclass of Tensor overrides torch's functions, so that its memory need not be its value."""
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    plain = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)
    return function not in plain or kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether `value` is a tensor that attention can read; while torch.compile traces, whether it is a tensor."""
    return isinstance(value, Tensor) if torch.compiler.is_compiling() else tensor_fault(value) is None


def number(value: object) -> int | float | None:
    """Return `value` as a Python int or float; None if it is none, a bool, too large, or requires a gradient."""
    if not isinstance(value, int | float) and (isinstance(value, Tensor) or getattr(value, "shape", None) == ()):
        value = _only_element(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    value = int(value) if isinstance(value, Integral) else value
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return value if isinstance(value, int) else as_float


def _only_element(x: Any) -> object:
    """Return the element of a 0-d tensor or array; None if it has none, torch traces, or it requires a gradient."""
    traced = torch.compiler.is_compiling() or is_fake(x)
    if isinstance(x, Tensor) and (traced or not is_tensor(x) or x.ndim):
        return None
    return None if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled() else x.item()


def with_article(noun: str) -> str:
    """Say "an int", "a list"."""
    return f"a{'n' * (noun[:1] in tuple('AEIOaeio'))} {noun}"


def of_type(value: object) -> str:
    """Describe a value by its type in an error message: "an int", "a list"; None by its name."""
    return "None" if value is None else with_article(type(value).__name__)


def kind_of(value: Any) -> str:
    """Describe a value in an error message: tensors and arrays by dtype and shape, others by repr, cut if long."""
    if isinstance(value, Tensor):
        if is_tensor(value) or (fault := tensor_fault(value)) is None:
            more = " that requires a gradient" * (value.requires_grad and not value.ndim and torch.is_grad_enabled())
            return f"a {value.dtype} tensor of shape {tuple(value.shape)}{more}"
        return fault.what[3:] if fault.what.startswith(("is a ", "is an ")) else f"a tensor that {fault.what}"
    if type(value).__module__ == "numpy" and hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a NumPy array of shape {value.shape}" if value.shape else repr(value)
    try:
        text = of_type(value) if torch.compiler.is_dynamo_compiling() else " ".join(repr(value).split())
    except Exception:  # an int with too many digits to print, an object that cannot print itself
        return of_type(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
