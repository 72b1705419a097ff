"""Writes a call without its tensors as text, since torch passes only tensors, numbers and strings to operators.

    write(call, checked) ─▶ text        text, tensors ─ read ─▶ Parsed

The text holds the programs of mask and score, the numbers, and the kind of the sequence, so a graph that was compiled
and stored by another process needs nothing else.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any, NamedTuple, cast

from torch import Tensor

from warpattn.language.nodes import Node, ProgramKey
from warpattn.masks import Mask, MaskProgram
from warpattn.problem import Call, CheckedCall
from warpattn.scores import Score, ScoreProgram
from warpattn.sequences import Dense, PagedKV, PagedRagged, Ragged, Sequence
from warpattn.sequences.latent import LatentPages

DENSE = Dense()


class Tail(NamedTuple):
    """The arguments of a call other than its tensors, mask, score and sequence."""

    scale: float
    return_lse: bool
    backend: str
    deterministic: bool | None


class Parsed(NamedTuple):
    """A text that was read."""

    mask: Mask
    score: Score | None
    tail: Tail
    sequence: tuple[Any, ...]  # kind of the sequence, its bounds, and the names of its tensors beside q, k and v


def write(call: Call, checked: CheckedCall, return_lse: bool) -> str:
    """Write a call as text."""
    tail = (float(checked.scale), return_lse, call.backend, call.deterministic)
    layout = (call.sequence.kind, call.sequence.bounds(), tuple(call.sequence.indices()))
    return repr((checked.mask.key, checked.score.key if checked.score else None, tail, layout))


def has_lse(text: str) -> bool:
    """Whether the call returns its LSE."""
    return Tail(*_literal(text)[2]).return_lse


def read(text: str, mask_tensors: tuple[Tensor, ...], score_tensors: tuple[Tensor, ...]) -> Parsed:
    """Read a text and attach its tensors; without any it returns the same objects again, so launches are remembered."""
    return _read_plain(text) if not (mask_tensors or score_tensors) else _parse(text, mask_tensors, score_tensors)


def layout(text: str) -> tuple[Any, ...]:
    """Return the same of a text that `Parsed.sequence` has."""
    return _literal(text)[3]


def sequence_of(layout: tuple[Any, ...], k: Tensor, v: Tensor, indices: list[Tensor]) -> Sequence:
    """Rebuild the sequence of a parsed call."""
    kind, bounds, names = layout
    fields = {_field(name): x for name, x in zip(names, indices, strict=True)}
    if kind == Dense.kind:
        return Dense(**fields) if fields else DENSE
    if kind == Ragged.kind:
        max_q, max_k = bounds
        return Ragged(**fields, max_q=max_q, max_k=max_k)
    cu_q, rope = fields.pop("cu_q", None), fields.pop("rope", None)
    table, lengths = fields.pop("block_table"), fields.pop("lengths")
    pages = PagedKV(k, v, table, lengths) if rope is None else LatentPages(k, rope, table, lengths)
    pages = pages.with_fields(**fields) if fields else pages
    return pages if cu_q is None else PagedRagged(pages, Ragged(cu_q, None, *bounds))


def _field(name: str) -> str:
    """Return the field of a sequence for the name in messages: "kv.k_scale" and "k.scale" are k_scale."""
    return name.removeprefix("seq.").removeprefix("kv.").replace(".", "_")


def replay(key: ProgramKey) -> list[Node]:
    """Rebuild the output nodes of a program."""
    nodes: list[Node] = []
    for op, dtype, *args in key.code:
        if op == "const":
            text = args[0]
            args = [text == "True" if dtype == "bool" else float(text) if dtype == "float" else int(text)]
        elif op != "sym":
            slot = [args.pop(0)] if op == "load" else []
            args = slot + [nodes[i] for i in args]
        nodes.append(Node((op, dtype, *args)))
    return [nodes[i] for i in key.outputs]


@lru_cache(256)
def _literal(text: str) -> tuple[Any, ...]:
    return ast.literal_eval(text)


def _parse(text: str, mask_tensors: tuple[Tensor, ...], score_tensors: tuple[Tensor, ...]) -> Parsed:
    mask_key, score_key, tail, sequence = _literal(text)
    mask_key, score_key = ProgramKey(*mask_key), None if score_key is None else ProgramKey(*score_key)
    keep, *span = replay(mask_key)
    mask = _RecordedMask(MaskProgram(keep, cast("Any", tuple(span)), mask_tensors, mask_key))
    score = None if score_key is None else _RecordedScore(ScoreProgram(replay(score_key)[0], score_tensors, score_key))
    return Parsed(mask, score, Tail(*tail), sequence)


@lru_cache(256)
def _read_plain(text: str) -> Parsed:
    return _parse(text, (), ())


class _RecordedMask(Mask):
    """A mask that is only its program."""

    def __init__(self, program: MaskProgram) -> None:
        self.__dict__["_program"] = program


class _RecordedScore(Score):
    """A score that is only its program."""

    def __init__(self, program: ScoreProgram) -> None:
        self.__dict__["_program"] = program
