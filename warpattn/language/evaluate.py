"""Evaluates the nodes of a traced mask or score with torch, tile by tile, for the reference and for pictures.

Symbols are bound to Python numbers or to int tensors that broadcast against each other (b as [B, 1, 1, 1], q as [R, 1],
...). Float loads are cast to `float_dtype` and stay differentiable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from warpattn.language import eager
from warpattn.language.nodes import Node, postorder


def evaluate(
    node: Node, env: Mapping[str, Any], tensors: Sequence[Tensor], float_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return one node's value as a tensor, in the shape to which the symbols it depends on broadcast (maybe `()`).

    `env` maps symbol names to numbers or tensors, `tensors` are the program's. Ints are int64, bools torch.bool.
    """
    (value,) = evaluate_all((node,), env, tensors, float_dtype)
    if isinstance(value, Tensor):
        return value
    return _number(value, {"bool": torch.bool, "float": float_dtype}.get(node.dtype, torch.int64))


def evaluate_all(
    nodes: tuple[Node, ...], env: Mapping[str, Any], tensors: Sequence[Tensor], float_dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Return the values of several nodes, shared parts computed once; Python numbers if they depend on such only."""
    values: dict[int, Any] = {}
    for node in postorder(nodes):
        args = [values[id(operand)] for operand in node.operands]
        values[id(node)] = _value(node, args, env, tensors, float_dtype)
    return [values[id(node)] for node in nodes]


def _value(
    node: Node, args: list[Any], env: Mapping[str, Any], tensors: Sequence[Tensor], float_dtype: torch.dtype
) -> Any:
    op, dtype = node.op, node.dtype
    if op == "const":
        return node.value
    if op == "sym":
        return env[node.value]
    if op == "load":
        value = eager.read(tensors[node.value], tuple(args))
        return value.to(float_dtype) if dtype == "float" else value
    if op == "float" and isinstance(args[0], Tensor):
        return args[0].to(float_dtype)
    if op == "where" and dtype == "float":  # two Python floats would make torch's default dtype
        args[1:] = [x if isinstance(x, Tensor) else _number(x, float_dtype) for x in args[1:]]
        args[1:] = [x.to(args[0].device) if isinstance(args[0], Tensor) and x.ndim == 0 else x for x in args[1:]]
    return eager.OPS[op](*args)


def _number(x: float, dtype: torch.dtype) -> Tensor:
    """Return a tensor without dimensions, on the CPU whatever torch's default device is."""
    return torch.tensor(x, dtype=dtype, device="cpu")
