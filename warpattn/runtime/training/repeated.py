"""Cache of launches for repeated backward calls: they only allocate a workspace and write addresses.

    key = traced mask and score, scale, determinism, and shape, strides and dtype of each tensor
    key -> launches, and offsets of workspace tensors in one allocation, made per call since dQ in fp32 is large
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from warpattn.masks import MaskProgram
from warpattn.problem.backward import CheckedBackward, Gradients
from warpattn.problem.launch import TensorMap
from warpattn.problem.operands import ALIGNMENT, captured, captured_values
from warpattn.runtime import cuda
from warpattn.runtime.bound_launches import CAPTURED, BoundLaunches
from warpattn.scores import ScoreProgram
from warpattn.sequences import Dense
from warpattn.sequences import Sequence as Layout

AT_MOST = 512
APART = 256  # bytes: alignment of the tensors of a workspace


class _Kept(NamedTuple):
    bound: BoundLaunches
    places: tuple[int, ...]  # byte offset of each tensor of the workspace, then its size


_known: dict[Hashable, _Kept] = {}


def launched_again(checked: CheckedBackward, sequence: Layout, x: Gradients) -> bool:
    """Launch on the current device if an equal backward has run there before; False if not."""
    try:
        addresses, key = _identify(checked, sequence, x)
    except TypeError:
        return False
    kept = _known.get(key)
    if kept is None or cuda.current_device() != kept.bound.device:
        return False
    *places, size = kept.places
    workspace = torch.empty(size, dtype=torch.uint8, device=x.q.device)
    start = workspace.data_ptr()
    kept.bound((*addresses, *[start + place for place in places]), captured_values(captured(checked.forward)))
    return True


def remember(
    checked: CheckedBackward, sequence: Layout, x: Gradients, fitting: Gradients, bound: BoundLaunches
) -> None:
    """Keep the launches of a backward that has just run on `fitting`, if `fitting` contains no copies."""
    pairs = zip(x, fitting, strict=True)
    if any(a is not None and b is not None and a.data_ptr() != b.data_ptr() for a, b in pairs):
        return
    given = (*fitting, *_indices(sequence))
    workspace = _workspace_of(bound, given)
    try:
        _, key = _identify(checked, sequence, x)
        bound.follow((*given, *workspace), sum([1 + 2 * tensor.ndim for tensor in checked.forward.mask.tensors]))
    except (LookupError, TypeError):  # the same offsets for queries and keys; a subclass of Tensor
        return
    if len(_known) >= AT_MOST:
        _known.clear()
    sizes = [-(-tensor.nbytes // APART) * APART for tensor in workspace]
    _known[key] = _Kept(bound, tuple(accumulate(sizes, initial=0)))


def _workspace_of(bound: BoundLaunches, given: Sequence[Tensor | None]) -> list[Tensor]:
    """List tensors among the parameters that are neither `given` nor captured, each once; call before `follow`."""
    named = [pair for launch in bound.each for pair in zip(launch.kernel.parameters, launch.arguments, strict=True)]
    every = [value for parameter, value in named if parameter.name.partition(".")[0] not in CAPTURED]
    every = [value.tensor if isinstance(value, TensorMap) else value for value in every]
    known = {id(tensor) for tensor in given}
    return list({id(x): x for x in every if isinstance(x, Tensor) and id(x) not in known}.values())


def _identify(checked: CheckedBackward, sequence: Layout, x: Gradients) -> tuple[list[int], Hashable]:
    """Return addresses, 0 for None, and the key; raises TypeError for subclasses. One loop, since each call pays."""
    forward = checked.forward
    key: list[Hashable] = [_name(forward.mask), _name(forward.score), forward.scale, checked.deterministic]
    key += (type(sequence), sequence.bounds(), x.q.get_device())
    addresses: list[int] = []
    together = 0
    for tensor in (*x, *_indices(sequence)):
        if tensor is None:
            addresses.append(0)
            key.append(None)
            continue
        if type(tensor) is not Tensor:
            raise TypeError
        at = tensor.data_ptr()
        addresses.append(at)
        together |= at
        key += (tensor.shape, tensor.stride(), tensor.dtype)
    key.append(together % ALIGNMENT == 0)
    return addresses, tuple(key)


def _name(program: MaskProgram | ScoreProgram | None) -> Hashable:
    """Identify a mask or score by itself, which is quick; by its nodes if it has tensors, often new in each step."""
    return None if program is None else program.key if program.tensors else ref(program)


def _indices(sequence: Layout) -> Sequence[Tensor]:
    return () if type(sequence) is Dense else tuple(sequence.indices().values())
