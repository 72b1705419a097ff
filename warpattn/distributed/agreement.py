"""Lets ranks compare the arguments of a call before the first such call sends messages.

    described(call) ─ seen before ─▶ nothing
                    ─ new ─▶ all_gather_object ─▶ one AttentionError on every rank if two differ or one broke a rule

A rank whose shapes differ would otherwise wait for ever for a message of the right size. A call with a description that
all ranks have agreed on costs a lookup.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from warpattn.distributed.ranks import Ranks
from warpattn.errors import AttentionError
from warpattn.inputs import kind_of, number, of_type
from warpattn.language.traced import Traced

AT_MOST = 4096
PLAIN = (type(None), bool, str, torch.dtype)  # what a description can hold as it is
RULE = "all ranks must pass equal shapes, dtypes and arguments"

Description = tuple[tuple[str, Hashable], ...]

agreed: WeakKeyDictionary[dist.ProcessGroup, set[Hashable]] = WeakKeyDictionary()


def described(function: str, arguments: dict[str, Any]) -> Description:
    """Describe what all ranks of a call must share: properties of tensors, programs of masks and scores."""
    return ("the function", function), *((name, _described(value)) for name, value in arguments.items())


def agree(groups: list[Ranks], call: Description, check: Callable[[], object]) -> None:
    """Raise AttentionError on every rank unless all describe one call and `check()` raises on none.

    With several groups, such as the dimensions of a mesh, what one group finds is passed to the next.
    """
    known = agreed.setdefault(groups[-1].group, set())
    if call in known:
        return
    own, failure = _broken(check)
    mine = {name: str(value) for name, value in call}
    found = dict.fromkeys(own)
    for ranks in groups:
        told: list[tuple[int, dict[str, str], list[str]]] = [(0, {}, [])] * ranks.size
        dist.all_gather_object(told, (dist.get_rank(), mine, list(found)), group=ranks.group)
        found |= dict.fromkeys(reason for _, _, reasons in told for reason in reasons)
        found |= dict.fromkeys(_differences(told))
    if failure is not None:
        raise failure
    differences = [reason for reason in found if reason.endswith(RULE)]
    if found:
        raise AttentionError(*(differences or own or found))
    if len(known) >= AT_MOST:
        known.clear()
    known.add(call)


def _differences(told: list[tuple[int, dict[str, str], list[str]]]) -> Iterator[str]:
    """Yield one sentence for every argument of a rank that differs from the first rank's."""
    first, theirs, _ = told[0]
    for rank, arguments, _ in told[1:]:
        for name, value in theirs.items():
            if arguments.get(name) != value:
                yield f"{name} is {arguments.get(name)} on rank {rank} and {value} on rank {first}; {RULE}"


def _broken(check: Callable[[], object]) -> tuple[tuple[str, ...], Exception | None]:
    """Return the rules that this rank's own arguments break, or another error, which other ranks are told, so that they
    do not wait for this rank."""
    try:
        check()
    except AttentionError as error:
        return error.reasons, None
    except Exception as error:
        return (f"rank {dist.get_rank()} ended in {of_type(error)}; its own message says more",), error
    return (), None


def _described(value: Any) -> Hashable:
    plain = number(value)
    if plain is not None:
        return plain
    if isinstance(value, Tensor):
        needs = ", requires a gradient" if value.requires_grad else ""
        return f"{kind_of(value)}{needs}"
    if isinstance(value, Traced):
        return _Program(value)
    return value if type(value) in PLAIN else kind_of(value)


class _Program:
    """A mask or score, equal to others with the same code and captured tensors of the same kinds."""

    def __init__(self, value: Traced) -> None:
        try:
            program = value.program()
        except AttentionError as error:
            self.key, self.name = error.reasons, type(value).__name__
            return
        self.key = (program.key, tuple((x.shape, x.dtype, x.requires_grad) for x in program.tensors))
        self.name = type(value).__name__

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Program) and self.key == other.key

    def __str__(self) -> str:
        return f"{self.name} ({zlib.crc32(repr(self.key).encode()):08x})"
