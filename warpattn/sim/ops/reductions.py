"""What a TMA reduction makes of the element in memory and the one that arrives.

Which types a reduction takes the compiler checks. A descriptor knows the sign of its integers, unlike all other types.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..ir.formats import decode, encode, rounder
from ..ir.module import Op

Update = Callable[[np.ndarray, np.ndarray], np.ndarray]

_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "min": np.fmin, "max": np.fmax,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def update_of(op: Op) -> Update:
    """How an `async_tma_reduce` combines the bits in memory with those of its tile."""
    name, kind = op.text.partition(",")[0].strip(), op.inputs[0]
    if name not in _FUNCTIONS:
        raise op.error(f"the reduction {name!r} by TMA is not simulated")
    function, narrow = _FUNCTIONS[name], rounder(kind.elem)
    if not kind.is_float:
        dtype = np.dtype(f"{'u' if 'xui' in kind.text else 'i'}{kind.itemsize}")
        return lambda old, new: function(old.view(dtype), new.view(dtype)).view(old.dtype)

    def update(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        result = function(decode(old, kind.elem), decode(new, kind.elem))
        return encode(result if narrow is None else narrow(result), kind.elem)

    return update


__all__ = ["Update", "update_of"]
