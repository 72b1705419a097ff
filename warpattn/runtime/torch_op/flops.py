"""What torch's FlopCounterMode counts for the operators: products of all pairs of queries and keys, as in torch's SDPA.
Lengths are read where they have values; else each sequence has the most keys that it may have.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from torch import Tensor
from torch.utils import _python_dispatch, flop_counter

from warpattn.runtime.torch_op import program
from warpattn.torch_modes import is_fake, is_recorded

_ours: dict[Any, Any] = {}


def register(forward: Any, backward: Any) -> None:
    """Make both operators known: two products of a forward, five of a backward."""
    _ours[forward] = lambda q, k, v, _, indices, *rest, **result: _flops((q, k, v), indices, rest[2], (1, 1))
    _ours[backward] = lambda _, saved, sinks, indices, *rest, **result: _flops(saved, indices, rest[2], (3, 2))
    for operator, formula in _ours.items():
        flop_counter.register_flop_formula(operator, get_raw=True)(formula)


def tell_counters() -> None:
    """Give the formulas to active counters, which were perhaps made before the operators were."""
    for mode in _python_dispatch._get_current_dispatch_mode_stack():
        known = getattr(getattr(mode, "counter", None), "flop_registry", _ours)
        known.update({operator: formula for operator, formula in _ours.items() if operator not in known})


def _flops(saved: Many[Tensor], indices: Many[Tensor], call: str, products: tuple[int, int]) -> int:
    q, k, v, *_ = saved
    _, bounds, names = program.layout(call)
    named = dict(zip(names, indices, strict=True))
    dim = q.shape[-1] + (named["q.rope"].shape[-1] if "q.rope" in named else 0)
    return 2 * q.shape[-2] * _pairs(q, k, named, bounds) * (products[0] * dim + products[1] * v.shape[-1])


def _pairs(q: Tensor, k: Tensor, named: dict[str, Tensor], bounds: tuple[int | None, ...]) -> int:
    rows, cu_q, lengths = q.shape[:-2].numel(), named.get("seq.cu_q"), named.get("kv.lengths")
    cu_k = named.get("seq.cu_k", cu_q)
    if (is_recorded() or is_fake(q)) and lengths is not None:
        return rows * named["kv.block_table"].shape[1] * k.shape[1]
    if (is_recorded() or is_fake(q)) and cu_q is not None:
        return rows * min([len(k), *(most for most in bounds[cu_k is not cu_q :] if most is not None)])
    keys = lengths if lengths is not None or cu_k is None else cu_k.diff()
    queries = q.shape[1] if cu_q is None else cu_q.diff()
    return rows * k.shape[1] if keys is None else int((queries * keys.long()).sum())
