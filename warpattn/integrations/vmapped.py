"""torch.vmap over a function whose leading dimensions broadcast: what it maps becomes one more of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]


def is_mapping() -> bool:
    """Whether the innermost transform of torch.func is a vmap."""
    top = functorch.peek_interpreter_stack()
    return top is not None and top.key() == functorch.TransformType.Vmap


def over_leading(call: Callable[..., Tensor], *given: Any) -> Tensor:
    """Return call(*given) outside of the innermost vmap, which `is_mapping`; others than tensors stay as they are."""
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    rank = max((x.ndim for x in given[:3] if isinstance(x, Tensor)), default=0)
    more = [rank - x.ndim if isinstance(x, Tensor) else 0 for x in given]
    dims = [_dim(x, level) for x in given]
    if dims == [None] * len(dims):
        with interpreter.lower():
            return call(*given)
    with interpreter.lower():
        result = call(*map(_leading, given, dims, more))
    return functorch._add_batch_dim(result, 0, level)


def _leading(x: Any, dim: int | None, more: int) -> Any:
    """Return a tensor whose mapped dimension comes first, before `more` of size 1. One without it broadcasts as it is,
    unless it has more dimensions than q, k and v, which is an error: then the mapped one is written."""
    if dim is None:
        return x if more >= 0 else x[None]
    return functorch.get_unwrapped(x).movedim(dim, 0)[(slice(None), *[None] * more)]


def _dim(x: Any, level: int) -> int | None:
    """Return the dimension that vmap maps at a level; None if it maps none of x."""
    own = isinstance(x, Tensor) and functorch.is_batchedtensor(x) and functorch.maybe_get_level(x) == level
    return functorch.maybe_get_bdim(x) if own else None
