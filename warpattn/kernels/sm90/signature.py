"""What Triton compiles for an attention kernel on Hopper: the types and constants that all of them have."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon import language as gl

from warpattn.problem.operands import Features

from ..pieces.signature import ALIGNED, captured_types, kernel_source, modifier_functions


def map_types(boxes: list[tuple[int, ...]], dtype: Any) -> tuple[str, ...]:
    """The types of TMA descriptors whose boxes are in shared memory with the layout that wgmma reads."""
    layouts = [gl.NVMMASharedLayout.get_default_for(list(box), dtype) for box in boxes]
    return tuple(f"tensordesc<{dtype}{list(box)},{at!r}>" for box, at in zip(boxes, layouts, strict=True))


def attention_source(
    kernel: Any, args: Mapping[str, Any], config: Any, features: Features, maps: Mapping[str, Any],
    aligned: tuple[str, ...] = (), more: Mapping[str, Any] = MappingProxyType({}),
) -> GluonASTSource:  # fmt: skip
    """The kernel of a launch with `args`; `maps`: the types of its tensor maps, `aligned`: its pointers to multiples of
    16 bytes, both by path; `more`: constants of its own."""
    mask, score, has_sinks, has_lse, split_keys = features
    functions = modifier_functions(mask, score, folds=True, split_keys=split_keys)
    constants = {"config": config, "functions": functions, "has_sinks": has_sinks, "has_lse": has_lse, **more}
    given = {**captured_types(mask, score, "sm90"), **maps}
    return kernel_source(kernel, args, constants, given, dict.fromkeys(aligned, ALIGNED))
