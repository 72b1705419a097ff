"""The arguments of kernels: the tensors of a call as kernels take them, and its traced mask and score as programs.

Kernels of every architecture take q, k, v and out in place if their rows start at multiples of 16 bytes (TMA
and vector loads need it); the others are copied once, rows filled up with zeros to a multiple of 8 elements.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.language.nodes import FIRST, KEEP, Node, Program
from warpattn.problem.memory import overwrite
from warpattn.problem.problem import CheckedCall, Problem

PACKED = torch.contiguous_format
MAX_INDEX = 2**31 - 1
ALIGNMENT = 16  # bytes, of TMA addresses and strides
RUN = 8  # elements: kernels are given strides in such runs, of 16 bytes in a two-byte tensor
LEAST_SCALE = 2.0**-100  # below it the kernel's own c = scale * log2(e) is no positive, normal fp32 number
IDENTITY = Program((Node(("sym", "float", "s")),), ())  # for scales below the least, which no exponential takes
NO_FUNCTION = Program((), ())  # a score without an output: products are scores, which the kernel multiplies by c
COPY_RULE = (
    "q, k, v and out stay where they are if their last stride is 1, the others are multiples of 8 elements above 0 (16 "
    "of 8 bits), their head dim is such a multiple, and they start at a multiple of 16 bytes; a tensor that does not "
    "is copied once"
)


class Operands(NamedTuple):
    """Tensors of one call: q, k, v, out in the shapes of its sequence kind; lse fp32 or None; sinks (Hq,) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None
    sinks: Tensor | None


class Features(NamedTuple):
    """What an attention kernel is compiled for, in addition to its config."""

    mask: Program
    score: Program | None
    has_sinks: bool
    has_lse: bool
    split_keys: bool = False  # keep's k is (k, column, first), see codegen

    @property
    def key(self) -> Hashable:
        """The part of the cache key of compiled code that comes from the features."""
        return (self.mask.key, None if self.score is None else self.score.key, self.has_sinks, self.has_lse)


def fitted(x: Operands) -> Operands:
    """Return the operands as kernels take them: what TMA cannot address is copied (q, k, v) or replaced by a temporary
    (out); sinks are in fp32. A tensor that is given twice gets an alias, so that operands are separate objects."""
    q, k, v = [t if addressable(t) else packed(t) for t in (x.q, x.k, x.v)]
    out = x.out if addressable(x.out) else x.out.new_empty((*x.out.shape[:-1], whole_runs(x.out.shape[-1])))
    k = k.detach() if k is q else k
    v = v.detach() if v is q or v is k else v
    return Operands(q, k, v, out, x.lse, logits(x.sinks))


def addressable(x: Tensor) -> bool:
    """Whether TMA can read or write a (B, S, H, D) tensor in place, see `COPY_RULE`."""
    *outer, (columns, step) = zip(x.shape, x.stride(), strict=True)
    run = run_of(x)
    strides = step == 1 and all(size == 1 or (stride > 0 and stride % run == 0) for size, stride in outer)
    return strides and columns % run == 0 and x.data_ptr() % ALIGNMENT == 0


def run_of(x: Tensor) -> int:
    """The unit of a tensor's strides in elements: 16 of 8 bits, else 8, also for fp32 and wider."""
    return 2 * RUN if x.dtype.itemsize == 1 else RUN


def described(x: Tensor) -> tuple[Hashable, ...]:
    """Return all that a launch depends on in a tensor, except for its address and values."""
    return (type(x), x.shape, x.stride(), x.dtype, x.get_device())


def captured(checked: CheckedCall) -> tuple[Tensor, ...]:
    """Return captured tensors in the kernel's order: the mask's, then the score's."""
    return checked.mask.tensors if checked.score is None else checked.mask.tensors + checked.score.tensors


def flat(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Pointer, sizes and strides of every captured tensor, one after the other."""
    return tuple(value for x in tensors for value in (x, *x.shape, *x.stride()))


def captured_values(tensors: Sequence[Tensor]) -> list[int]:
    """Return the values of `flat` as numbers: address, sizes, strides of each tensor. Kernels index with 32 bits, so
    larger sizes are cut to 2**31 - 1."""
    values: list[int] = []
    for tensor in tensors:
        values.append(tensor.data_ptr())
        values += [min(size, MAX_INDEX) for size in tensor.shape]
        values += tensor.stride()
    return values


def modifier_args(checked: CheckedCall) -> dict[str, tuple[Any, ...]]:
    """The kernel arguments `mask_args` and `score_args`: the tensors that each captured, as `flat` lists them."""
    score = () if checked.score is None else checked.score.tensors
    named = {"mask_args": checked.mask.tensors, "score_args": score}
    return {name: flat([tensor.detach() for tensor in tensors]) for name, tensors in named.items()}


def run_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of all dimensions but the last in runs of `RUN` elements; 0 for dimensions of one element."""
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return tuple(stride // RUN if size > 1 else 0 for size, stride in outer)


def programs(checked: CheckedCall, most: float = math.inf) -> tuple[Program, Program | None]:
    """Return the mask's and the score's programs as the kernels take them. `most` is the largest exponent that their
    plain softmax takes; a call without a score whose exponent may be larger gets `NO_FUNCTION`."""
    mask = Program((checked.mask.keep, *checked.mask.span), checked.mask.tensors)
    mask.__dict__["key"] = checked.mask.key  # known from the trace: the nodes are not numbered again
    if checked.score is not None:
        return mask, Program((checked.score.out,), checked.score.tensors)
    large = NO_FUNCTION if checked.exponent > most else None
    return mask, IDENTITY if checked.scale < LEAST_SCALE else large


def is_masked(problem: Problem) -> bool:
    """Whether the mask may hide something."""
    mask = problem.mask
    return mask.code[mask.outputs[KEEP]] != ("const", "bool", "True")


def sees_first_keys(problem: Problem) -> bool:
    """Whether the mask's interval of keys begins with key 0 for each row, as far as its program shows."""
    mask = problem.mask
    return mask.code[mask.outputs[FIRST]] == ("const", "int", "0")


def without_keys(x: Operands) -> None:
    """Write the results of rows without any key: zeros, or NaN for a head whose sink is NaN or +inf; LSE: the sinks."""
    sinks = x.out.new_full(x.out.shape[-2:-1], -torch.inf, dtype=torch.float32) if x.sinks is None else x.sinks
    zeros = (sinks * 0).masked_fill(sinks == -torch.inf, 0.0)[:, None]
    overwrite(x.out, zeros.expand_as(x.out))
    if x.lse is not None:
        overwrite(x.lse, (sinks[:, None] + zeros).expand_as(x.lse))


def whole_runs(size: int) -> int:
    """Round a head dim up to a multiple of `RUN`, the columns that kernels have for it."""
    return RUN * -(-size // RUN)


def hand_over(fitting: Operands, x: Operands) -> None:
    """Copy an output that was computed in a temporary into the caller's tensor."""
    if fitting.out is not x.out:
        overwrite(x.out, fitting.out[..., : x.out.shape[-1]])


def packed(x: Tensor) -> Tensor:
    """Return a contiguous copy, rows padded with zeros to whole runs."""
    size = x.shape[-1]
    if size % run_of(x) == 0:
        return x.clone(memory_format=PACKED)
    wide = x.new_zeros((*x.shape[:-1], whole_runs(size)))
    wide[..., :size] = x
    return wide


def logits(sinks: Tensor | None) -> Tensor | None:
    """Return sinks as the kernel reads them: fp32, contiguous."""
    return None if sinks is None else sinks.to(torch.float32).contiguous()
