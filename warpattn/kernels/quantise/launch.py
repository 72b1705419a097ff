"""The launches that make 8-bit values and scales of a tensor."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.kernels.cache.config import VECTOR, Rows, rows_of_program
from warpattn.kernels.cache.launch import run_of
from warpattn.problem.arch import compile_options
from warpattn.problem.element import element_of
from warpattn.problem.launch import Launch

from .config import QuantiseConfig, QuantiseShape, programs_of_head


class Quantising(NamedTuple):
    """What one call reads and writes."""

    x: Tensor  # (sequences, tokens, heads, dim), its last stride 1; one sequence is read faster
    values: Tensor  # of the same shape, without gaps
    scale: Tensor  # fp32, (), (heads,) or (sequences, tokens, heads)
    sizes: Tensor | None  # see `partial_sizes`
    given: bool  # whether the scale is read, not made


def partial_sizes(x: Tensor) -> Tensor:
    """Memory for the maxima of parts of x (sequences, tokens, heads, dim), of which a tensor's or a head's scale is
    made."""
    rows = rows_of_program(x.shape[-1:], x.dtype.itemsize)
    heads = x.shape[2]
    return x.new_empty((heads, programs_of_head(-(-x.shape[0] * x.shape[1] // rows), heads)), dtype=torch.float32)


def quantise_launches(arch: str, call: Quantising) -> tuple[Launch, ...]:
    """On an architecture: one launch, two where a tensor's or a head's scale is made."""
    x, values, scale, sizes, given = call
    outer, tokens, heads, dim = x.shape
    element, stored = element_of(x.dtype), element_of(values.dtype)
    rows = rows_of_program((dim,), element.bytes)
    run = run_of([x], element.bytes)
    run = run if dim % run == 0 else 1
    stored_run = math.gcd(dim, VECTOR)  # there are no gaps
    blocks = -(-outer * tokens // rows)
    parts = blocks if sizes is None else programs_of_head(blocks, heads)
    per = {0: "tensor", 1: "head", 3: "token"}[scale.ndim]
    read = {"tensor": parts * heads, "head": parts}.get(per, 0) if sizes is not None else 0
    largest = torch.finfo(values.dtype).max
    slots = 1 << (read - 1).bit_length() if read else 0
    config = QuantiseConfig(dim, rows, run, stored_run, per, slots, given, largest, outer > 1)
    strides = (*[0] * (3 - scale.ndim), *scale.stride())
    shape = QuantiseShape(outer * tokens, tokens, heads, parts)
    shared = {"x": rows_of(x, run), "shape": shape, "sizes_ptr": sizes}
    every = shared | {"values": rows_of(values, stored_run), "scale": Rows(scale, *strides)}

    def launch(name: str, args: dict[str, Any]) -> Launch:
        def source():
            from .signature import quantise_source  # imports Triton

            return quantise_source(name, args, config, arch)

        key = (element.name, stored.name, config)
        return Launch(f"{arch}.{name}", arch, key, source, compile_options(), (heads * parts,), args)

    last = launch("values", every)
    return (last,) if sizes is None else (launch("sizes", shared), last)


def rows_of(x: Tensor, run: int) -> Rows:
    """Pointer and strides of (sequence, token, head, dim) in runs; 0 of dimensions of one element."""
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return Rows(x, *[stride // run if size > 1 else 0 for size, stride in outer])
