"""Makes the source, argument types and constants with which Triton compiles a Hopper attention kernel."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon import language as gl

from warpattn.problem.operands import Features

from ..pieces.signature import ALIGNED, captured_types, kernel_source, modifier_functions


def map_types(boxes: list[tuple[int, ...]], dtype: Any) -> tuple[str, ...]:
    """Types of TMA descriptors with these `boxes`, which land in shared memory in the layout that wgmma reads."""
    layouts = [gl.NVMMASharedLayout.get_default_for(list(box), dtype) for box in boxes]
    return tuple(f"tensordesc<{dtype}{list(box)},{at!r}>" for box, at in zip(boxes, layouts, strict=True))


def attention_source(
    kernel: Any, args: Mapping[str, Any], config: Any, features: Features, maps: Mapping[str, Any],
    aligned: tuple[str, ...] = (), more: Mapping[str, Any] = MappingProxyType({}),
) -> GluonASTSource:  # fmt: skip
    """Source of a launch's kernel. `maps`: types of its tensor maps by argument path; `aligned`: paths of pointers
    that are multiples of 16 bytes; `more`: further constants."""
    mask, score, has_sinks, has_lse, split_keys = features
    functions = modifier_functions(mask, score, folds=True, split_keys=split_keys)
    constants = {"config": config, "functions": functions, "has_sinks": has_sinks, "has_lse": has_lse, **more}
    given = {**captured_types(mask, score, "sm90"), **maps}
    return kernel_source(kernel, args, constants, given, dict.fromkeys(aligned, ALIGNED))
