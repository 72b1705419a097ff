"""Attention calls while torch traces them (torch.compile, torch.export): each becomes one operator.

    attend      called by `attention`, `attention_varlen` and `attention_paged` while torch traces them
      record    runs outside of the tracer, and calls the operator

Masks and scores are pytrees of their tensors: the tracer sees the tensors, so a graph stays right when captured tensors
change. This module is imported when torch traces, because it needs torch._dynamo.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from warpattn.language.expr import Table
from warpattn.language.traced import Traced
from warpattn.problem import Call
from warpattn.runtime.execute import Result
from warpattn.runtime.torch_op import operators
from warpattn.sequences import Dense, PagedKV, PagedRagged, Ragged, Sequence
from warpattn.sequences.latent import LatentPages


def attend(call: Call) -> Result:
    """Record a call as an operator of the graph that is being traced; values of lengths and tables are not checked."""
    _learn_kinds()
    return operators.returned(call, *_record(call))


_record = torch._dynamo.nonstrict_trace(operators.record)


def _flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """Split a value into (its tensors, numbers, masks, scores and sequences; everything else)."""
    children: list[Any] = []
    fields = [(field.name, _split(getattr(value, field.name), children)) for field in dataclasses.fields(value)]
    return children, (type(value), tuple(fields))


def _split(value: Any, children: list[Any]) -> tuple[str, Any]:
    # The tracer may treat numbers as symbols, too; it takes them as children, as it does tensors.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number or isinstance(value, Tensor | Traced | Table | Sequence):
        children.append(value)
        return "child", len(children) - 1
    if isinstance(value, tuple):
        return "tuple", tuple([_split(x, children) for x in value])
    return "plain", value


def _unflatten(children: Iterable[Any], context: tuple[Any, ...]) -> Any:
    kind, fields = context
    listed, value = list(children), object.__new__(kind)
    for name, part in fields:
        object.__setattr__(value, name, _joined(part, listed))
    return value


def _joined(part: tuple[str, Any], children: list[Any]) -> Any:
    kind, value = part
    if kind == "tuple":
        return tuple([_joined(x, children) for x in value])
    if kind == "plain":
        return value
    child = children[value]
    if isinstance(child, torch.SymInt | torch.SymFloat):  # the graph is made for this number
        return int(child) if isinstance(child, torch.SymInt) else float(child)
    return child


def _kinds(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)


@torch.compiler.assume_constant_result  # run, not traced, whenever a call is traced
def _learn_kinds() -> bool:
    """Register masks and scores that users and adapters have defined meanwhile as pytrees."""
    for kind in _kinds(Traced):
        if dataclasses.is_dataclass(kind) and kind not in _known:
            _known.add(kind)
            pytree.register_pytree_node(kind, _flatten, _unflatten)
    return True


_known: set[type] = set()
for _kind in (Call, Table, Dense, Ragged, PagedKV, LatentPages, PagedRagged):
    pytree.register_pytree_node(_kind, _flatten, _unflatten)
_learn_kinds()
