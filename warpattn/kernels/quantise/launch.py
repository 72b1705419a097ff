"""The launches that make 8-bit values and scales of a tensor."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.kernels.cache.config import VECTOR, Rows, rows_of_program
from warpattn.kernels.cache.launch import run_of
from warpattn.problem.arch import compile_options
from warpattn.problem.element import element_of
from warpattn.problem.launch import Launch
from warpattn.quantized import KEYS_OF_PRODUCT

from .config import QuantiseConfig, QuantiseShape, programs_of_head


class Quantising(NamedTuple):
    """What one call reads and writes."""

    x: Tensor  # (sequences, tokens, heads, dim), its last stride 1; one sequence is read faster
    values: Tensor  # of the same shape, without gaps
    scale: Tensor  # fp32, (), (heads,) or (sequences, tokens, heads)
    sizes: Tensor | None  # see `partial_sizes`
    across: Tensor | None  # (batch, heads, dim, places), see `quantized.transposed_values`
    given: bool  # whether the scale is read, not made


def partial_sizes(x: Tensor) -> Tensor:
    """Memory for the maxima of parts of x (sequences, tokens, heads, dim), of which a tensor's or a head's scale is
    made."""
    rows = rows_of_program(x.shape[-1:], x.dtype.itemsize)
    heads = x.shape[2]
    return x.new_empty((heads, programs_of_head(-(-x.shape[0] * x.shape[1] // rows), heads)), dtype=torch.float32)


def quantise_launches(arch: str, call: Quantising) -> tuple[Launch, ...]:
    """On an architecture: one launch, two where a tensor's or a head's scale is made."""
    x, values, scale, sizes, across, given = call
    outer, tokens, heads, dim = x.shape
    element = element_of(x.dtype)
    rows = rows_of_program((dim,), element.bytes)
    run = run_of([x], element.bytes)
    run = run if dim % run == 0 else 1
    stored_run = math.gcd(dim, VECTOR)  # there are no gaps
    parts = -(-outer * tokens // rows) if sizes is None else sizes.shape[1]
    shape = QuantiseShape(outer * tokens, tokens, heads, parts)
    per = {0: "tensor", 1: "head", 3: "token"}[scale.ndim]
    read = 0 if sizes is None else {"tensor": sizes.numel(), "head": parts}[per]
    largest = torch.finfo(values.dtype).max
    slots = 1 << (read - 1).bit_length() if read else 0
    config = QuantiseConfig(dim, rows, run, stored_run, per, slots, given, largest, outer > 1)
    strides = (*[0] * (3 - scale.ndim), *scale.stride())
    shared = {"x": rows_of(x, run), "shape": shape, "sizes_ptr": sizes}
    every = shared | {"values": rows_of(values, stored_run), "across_ptr": across, "scale": Rows(scale, *strides)}

    def launch(name: str, args: dict[str, Any], config: QuantiseConfig) -> Launch:
        def source():
            from .signature import quantise_source  # imports Triton

            return quantise_source(name, args, config, arch)

        key = (element.name, element_of(values.dtype).name, config)
        grid = (heads * args["shape"].parts,)
        return Launch(f"{arch}.{name}", arch, key, source, compile_options(), grid, args)

    first = () if sizes is None else (launch("sizes", shared, config),)
    if across is not None:
        every, config = _by_sequences(every, config)
    return *first, launch("values", every, config)


def _by_sequences(args: dict[str, Any], config: QuantiseConfig) -> tuple[dict[str, Any], QuantiseConfig]:
    """Arguments and configuration that write values transposed, too: then a tile has whole runs of one sequence."""
    shape, count, rows = args["shape"], len(args["across_ptr"]), max(config.rows, KEYS_OF_PRODUCT)
    tokens = shape.count // count
    parts = shape.parts if config.sizes else count * -(-tokens // rows)
    changed = {"shape": shape._replace(tokens=tokens, parts=parts)}
    for name in ("x", "values"):
        given = args[name]  # sequences of one piece are one to the caller
        changed[name] = given if config.sequences else given._replace(outer=tokens * given.row)
    return args | changed, replace(config, rows=rows, sequences=True, transposed=True)


def rows_of(x: Tensor, run: int) -> Rows:
    """Pointer and strides of (sequence, token, head, dim) in runs; 0 of dimensions of one element."""
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return Rows(x, *[stride // run if size > 1 else 0 for size, stride in outer])
