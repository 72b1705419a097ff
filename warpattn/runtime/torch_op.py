"""The operator `warpattn::attention`, through which compiled graphs (torch.compile, torch.export) call attention.

    attend      what `attention`, `attention_varlen` and `attention_paged` do while torch traces them
      _record   runs outside of the tracer: rules, programs of mask and score as text, captured tensors as inputs
        warpattn::attention(q, k, v, sinks, offsets or tables, mask tensors, score tensors, text)

The text holds everything that is not a tensor, so a graph that was compiled and stored by another process needs nothing
else. Masks and scores are pytrees of their tensors: the tracer sees through them, and a graph stays right when captured
tensors change. There is no backward. Imported when torch traces, because it needs torch._dynamo.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from warpattn.errors import AttentionError
from warpattn.language.expr import Table
from warpattn.language.nodes import Node
from warpattn.language.traced import Traced
from warpattn.masks import Mask, MaskProgram
from warpattn.problem import Call, validate
from warpattn.runtime import execute
from warpattn.runtime.call_cache import Result
from warpattn.scores import Score, ScoreProgram
from warpattn.sequences import Dense, PagedKV, PagedRagged, Ragged, Sequence

__all__ = ["attend"]

DENSE = Dense()

class _Parsed(NamedTuple):
    """A text of `_record`, read."""

    mask: Mask
    score: Score | None
    scale: float
    return_lse: bool
    backend: str
    sequence: tuple[Any, ...]  # kind of the sequence, and its bounds


def attend(call: Call) -> Result:
    """`execute.attend` as an operator of the graph that is being traced. Values of lengths, offsets and tables are not
    checked."""
    _learn_kinds()
    result, lse = _record(call)
    if call.out is not None:
        result = call.out.copy_(result)
    return (result, lse) if call.return_lse else result


@torch._dynamo.nonstrict_trace
def _record(call: Call) -> tuple[Tensor, Tensor]:
    q, k, v, sinks, sequence = call.q, call.k, call.v, call.sinks, call.sequence
    try:
        checked = validate(call, read_values=False)
        mask_tensors, score_tensors = list(checked.mask.tensors), list(checked.score.tensors if checked.score else ())
        tensors = (q, k, v, *([] if sinks is None else [sinks]), *mask_tensors, *score_tensors)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            rule = "compiled graphs have no backward; call it uncompiled, or run under torch.no_grad()"
            raise AttentionError(f"an input requires gradients; {rule}")
    except AttentionError as error:  # raised when the graph runs: the tracer would bury it
        return _refuse(q.detach(), v.detach(), repr(error.reasons), call.return_lse is True)
    settled = (float(checked.scale), call.return_lse, call.backend)
    layout = (sequence.kind, *sequence.bounds())
    text = repr((checked.mask.key, checked.score.key if checked.score else None, settled, layout))
    return _attention(q, k, v, sinks, list(sequence.indices().values()), mask_tensors, score_tensors, text)


@torch.library.custom_op("warpattn::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    indices: list[Tensor],
    mask_tensors: list[Tensor],
    score_tensors: list[Tensor],
    call: str,
) -> tuple[Tensor, Tensor]:
    """Out and lse in the shapes of the sequence kind, or an empty lse if the call does not ask for it."""
    read = _read(call, tuple(mask_tensors), tuple(score_tensors))
    sequence = _sequence(read.sequence, k, v, indices)
    tail = (read.mask, read.score, sinks, read.scale, read.return_lse, None, read.backend)
    result = execute.attend(Call(q, k, v, sequence, *tail))
    out, lse = result if isinstance(result, tuple) else (result, _lse_like(q, False))
    return out.contiguous(), lse.contiguous()


@_attention.register_fake
def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    indices: list[Tensor],
    mask_tensors: list[Tensor],
    score_tensors: list[Tensor],
    call: str,
) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), _lse_like(q, ast.literal_eval(call)[2][1])


@torch.library.custom_op("warpattn::refused_attention", mutates_args=())
def _refuse(q: Tensor, v: Tensor, reasons: str, return_lse: bool) -> tuple[Tensor, Tensor]:
    """A call that breaks rules."""
    raise AttentionError(*ast.literal_eval(reasons))


@_refuse.register_fake
def _fake_refusal(q: Tensor, v: Tensor, reasons: str, return_lse: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], *v.shape[-1:])), _lse_like(q, return_lse and q.ndim in (3, 4))


def _lse_like(q: Tensor, wanted: bool) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if not wanted:
        return q.new_empty(0, dtype=dtype)
    *batch, rows, heads = q.shape[:-1]  # ragged batches have no batch axis
    return q.new_empty((*batch, heads, rows), dtype=dtype)


def _sequence(text: tuple[Any, ...], k: Tensor, v: Tensor, indices: list[Tensor]) -> Sequence:
    kind, *bounds = text
    if kind == Dense.kind:
        return DENSE
    if kind == PagedKV.kind:
        return PagedKV(k, v, *indices)
    cu_q, *cu_k = indices
    if kind == PagedRagged.kind:
        return PagedRagged(PagedKV(k, v, *cu_k), Ragged(cu_q, None, *bounds))
    return Ragged(cu_q, cu_k[0] if cu_k else None, *bounds)


def _read(
    call: str, mask_tensors: tuple[Tensor, ...], score_tensors: tuple[Tensor, ...]
) -> _Parsed:
    """A text of `_record` with its tensors; without any the same objects again, so that launches are remembered."""
    return _read_plain(call) if not (mask_tensors or score_tensors) else _parse(call, mask_tensors, score_tensors)


def _parse(
    call: str, mask_tensors: tuple[Tensor, ...], score_tensors: tuple[Tensor, ...]
) -> _Parsed:
    mask_key, score_key, tail, sequence = ast.literal_eval(call)
    keep, *span = _replay(mask_key)
    mask = _RecordedMask(MaskProgram(keep, cast("Any", tuple(span)), mask_tensors, mask_key))
    scale, return_lse, backend = tail
    if score_key is None:
        return _Parsed(mask, None, scale, return_lse, backend, sequence)
    score = _RecordedScore(ScoreProgram(_replay(score_key)[0], score_tensors, score_key))
    return _Parsed(mask, score, scale, return_lse, backend, sequence)


@lru_cache(256)
def _read_plain(call: str) -> _Parsed:
    return _parse(call, (), ())


class _RecordedMask(Mask):
    """A mask that is only its program."""

    def __init__(self, program: MaskProgram) -> None:
        self.__dict__["_program"] = program


class _RecordedScore(Score):
    """A score that is only its program."""

    def __init__(self, program: ScoreProgram) -> None:
        self.__dict__["_program"] = program


def _replay(key: tuple[Any, ...]) -> list[Node]:
    """The output nodes of a program from its `Program.key`."""
    code, outputs, _ = key
    nodes: list[Node] = []
    for op, dtype, *args in code:
        if op == "const":
            text = args[0]
            args = [text == "True" if dtype == "bool" else float(text) if dtype == "float" else int(text)]
        elif op != "sym":
            slot = [args.pop(0)] if op == "load" else []
            args = slot + [nodes[i] for i in args]
        nodes.append((op, dtype, *args))
    return [nodes[i] for i in outputs]


def _flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """(tensors, numbers, masks, scores and sequences inside of a value, everything else)."""
    children: list[Any] = []
    fields = [(field.name, _split(getattr(value, field.name), children)) for field in dataclasses.fields(value)]
    return children, (type(value), tuple(fields))


def _split(value: Any, children: list[Any]) -> tuple[str, Any]:
    # The tracer may keep numbers open, too; it wants them where tensors are.
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
    """Masks and scores that were defined since, by users and adapters, become pytrees, too."""
    for kind in _kinds(Traced):
        if dataclasses.is_dataclass(kind) and kind not in _known:
            _known.add(kind)
            pytree.register_pytree_node(kind, _flatten, _unflatten)
    return True


_known: set[type] = set()
for _kind in (Call, Table, Dense, Ragged, PagedKV, PagedRagged):
    pytree.register_pytree_node(_kind, _flatten, _unflatten)
_learn_kinds()
