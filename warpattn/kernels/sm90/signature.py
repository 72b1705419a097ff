"""What Triton compiles for an attention kernel on Hopper: the parameters and constants that all of them have."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import GluonASTSource
from triton.experimental.gluon import language as gl

from warpattn.language.nodes import Program

from ..pieces.signature import modifier_functions, tensor_signature

ALIGNED = [["tt.divisibility", 16]]


class Features(NamedTuple):
    """What a kernel is compiled for beside its config."""

    mask: Program
    score: Program | None
    has_sinks: bool
    has_lse: bool
    split_keys: bool = False  # keep's k is (k, column, first), see codegen


def map_types(boxes: list[tuple[int, ...]], dtype: Any) -> tuple[str, ...]:
    """The types of TMA descriptors whose boxes are in shared memory with the layout that wgmma reads."""
    layouts = [gl.NVMMASharedLayout.get_default_for(list(box), dtype) for box in boxes]
    return tuple(f"tensordesc<{dtype}{list(box)},{at!r}>" for box, at in zip(boxes, layouts, strict=True))


def attention_source(
    kernel: Any, config: Any, features: Features, signature: dict[str, Any], aligned: tuple[str, ...] = ()
) -> GluonASTSource:
    """A kernel with the `signature` of its own parameters; `aligned`: those that begin with a pointer to a multiple of
    16 bytes. Its mask, score and constants are added, and types brought into the kernel's order."""
    mask, score, has_sinks, has_lse, split_keys = features
    functions = modifier_functions(mask, score, folds=True, split_keys=split_keys)
    constants = {"config": config, "functions": functions, "has_sinks": has_sinks, "has_lse": has_lse}
    known: dict[str, Any] = {
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "scale": "fp32",
        "mask_args": tensor_signature(mask, "sm90"),
        "score_args": tensor_signature(score, "sm90"),
        **signature,
        **dict.fromkeys(constants, "constexpr"),
    }
    types = {name: known[name] for name in kernel.arg_names}
    hints = {(kernel.arg_names.index(name), 0): ALIGNED for name in aligned}
    return GluonASTSource(kernel, types, constants, hints)
