"""What must stay the same of a plan's tensors from step to step (`Like`), and the checks of every step."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.errors import AttentionError, many
from warpattn.inputs import tensor_fault
from warpattn.sequences import PagedRagged, Ragged, Sequence

# Shape (without the rows if they vary), strides, dtype, device, whether rows vary. A plain tuple, because every step
# runs `check_like`, and named tuples are unpacked more slowly.
Like = tuple[torch.Size, tuple[int, ...], torch.dtype, int, bool]


def like(x: Tensor, rows_vary: bool = False) -> Like:
    """Return what must stay the same of a tensor."""
    return (x.shape[1:] if rows_vary else x.shape, x.stride(), x.dtype, x.get_device(), rows_vary)


def rows_may_vary(sequence: Sequence, name: str, x: Tensor) -> bool:
    """Whether an index tensor of a step may have fewer rows than the plan's: those with rows per token may, over pages
    also those with rows per sequence; scales of pages or heads may not."""
    *of_keys, of_queries = sequence.scale_names
    if name == of_queries:
        return x.ndim > 1
    if isinstance(sequence, PagedRagged):
        return name not in of_keys
    return isinstance(sequence, Ragged) and (name == "q.rope" or (name in of_keys and x.ndim > 1))


def check_like(names: tuple[str, ...], tensors: tuple[Tensor, ...], planned: tuple[Like, ...]) -> None:
    """Raise an AttentionError that names the first tensor that is not as planned."""
    try:
        for x, (shape, strides, dtype, device, rows_vary) in zip(tensors, planned, strict=True):
            if x.shape != shape and not (rows_vary and x.shape[1:] == shape):
                break
            if x.stride() != strides or x.dtype is not dtype or x.get_device() != device:
                break
        else:
            return
    except (AttributeError, RuntimeError, TypeError, ValueError):  # fewer, no tensor, a nested one
        pass
    if len(tensors) != len(planned):
        what = f"the call has {many(len(tensors), 'tensor')}, offsets, tables and scales among them"
        raise AttentionError(f"{what}; the plan was made for {', '.join(names)}")
    for name, x, wanted in zip(names, tensors, planned, strict=True):
        refuse_other(name, x, wanted)


def refuse_other(name: str, x: object, wanted: Like) -> None:
    """Raise AttentionError if x is not as planned."""
    fault = tensor_fault(x)
    if fault is not None or not isinstance(x, Tensor):
        raise AttentionError(f"{name} {fault.what}; {name} {fault.rule}" if fault else f"{name} is no tensor")
    shape, strides, dtype, device, rows_vary = wanted
    if like(x, rows_vary) != wanted:
        what = f"{name} has shape {tuple(x.shape)}, strides {x.stride()} and {x.dtype} on {x.device}"
        rule = f"the plan was made for {'rows of ' if rows_vary else ''}{tuple(shape)}, strides {strides} and {dtype}"
        raise AttentionError(f"{what}; {rule} on {'cpu' if device < 0 else f'cuda:{device}'}")
