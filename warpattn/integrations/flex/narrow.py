"""Integers of 8 and 16 bits: in torch their arithmetic wraps around, while the language of masks has 32 and 64 bits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch

from warpattn.language.expr import Expr

BITS = {torch.uint8: 8, torch.int8: 8, torch.int16: 16}
CASTS = {"int": torch.int32, "long": torch.int64, "byte": torch.uint8, "char": torch.int8, "short": torch.int16}
_INSIDE = ("where", "masked_fill", "minimum", "maximum", "min", "max", "and", "or", "clone")  # these stay in range


def narrow_dtype(name: str, operands: tuple[Any, ...], named: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of the integers that torch's function `name` returns, None for 32 bits or more."""
    dtypes = [x if isinstance(x, torch.dtype) else getattr(x, "dtype", None) for x in (*operands, *named.values())]
    known = [x for x in dtypes if isinstance(x, torch.dtype) and (x != torch.bool or name == "to")]
    if name in CASTS:
        wanted = CASTS[name]
    elif name in ("to", "type", "type_as"):
        wanted = known[-1] if known else None
    else:
        wanted = reduce(torch.promote_types, known) if known else None
    return wanted if wanted in BITS else None


def narrowed(value: Any, name: str, dtype: torch.dtype | None) -> Any:
    """Wrap an int around as one of `dtype`, unless torch's function `name` keeps it in range; others unchanged."""
    if dtype is None or name in _INSIDE or not isinstance(value, Expr) or value.dtype not in ("int", "int64"):
        return value
    half = 0 if dtype == torch.uint8 else 1 << (BITS[dtype] - 1)
    wrapped = (value + half) & ((1 << BITS[dtype]) - 1)
    return wrapped - half if half else wrapped
