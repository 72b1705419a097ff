"""What Triton compiles for one decode config, mask and score on Hopper."""

from triton.experimental.gluon import GluonASTSource

from warpattn.language.nodes import Program

from ...pieces.signature import modifier_functions, packed_span, tensor_signature
from ..layouts import element_type, tile_layout
from ..mla.config import MlaConfig
from ..mla.kernel import mla_kernel
from .combine import decode_combine_kernel
from .config import DecodeConfig
from .kernel import decode_kernel


def decode_source(config: DecodeConfig, mask: Program, score: Program | None, has_sinks: bool, has_lse: bool):
    """The kernel with the types of its parameters and its constants."""

    def descriptor(cols: int) -> str:
        layout = tile_layout(config.box, cols, element_type(config.element))
        return f"tensordesc<{config.element.name}[1, {config.box}, 1, {cols}],{layout!r}>"

    matrix = _matrix(config)
    signature = {
        "k": matrix if config.gathers else (descriptor(config.k_cols),),
        "v": matrix if config.gathers else (descriptor(config.v_cols),),
        "q": matrix,
        **_shared_signature(config, mask),
        "scale": "fp32",
        "score_args": tensor_signature(score, "sm90"),
    }
    constants = _constants(config, modifier_functions(packed_span(mask), score), has_sinks, has_lse)
    names = ("q", "out", "workspace", *(("k", "v") if config.gathers else ()))
    kernel = mla_kernel if isinstance(config, MlaConfig) else decode_kernel
    return _source(kernel, signature, constants, names)


def combine_source(config: DecodeConfig, mask: Program, has_sinks: bool, has_lse: bool):
    """The same for the kernel that adds up parts."""
    functions = modifier_functions(packed_span(mask), None)
    constants = _constants(config, functions, has_sinks, has_lse)
    return _source(decode_combine_kernel, _shared_signature(config, mask), constants, ("out", "workspace"))


def _matrix(config: DecodeConfig) -> tuple[str, ...]:
    return (config.element.pointer, "i64", "i64", "i64")


def _shared_signature(config: DecodeConfig, mask: Program) -> dict[str, object]:
    """Parameters of both kernels."""
    return {
        "out": _matrix(config),
        "keys": ("*i32", "*i32", "i64"),
        "workspace": ("*fp32", "*fp32", "i32", "*i32"),
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "shape": ("i32",) * 10,
        "mask_args": tensor_signature(mask, "sm90"),
    }


def _constants(config: DecodeConfig, functions: object, has_sinks: bool, has_lse: bool) -> dict[str, object]:
    return {"config": config, "functions": functions, "has_sinks": has_sinks, "has_lse": has_lse}


def _source(kernel, signature: dict[str, object], constants: dict[str, object], aligned: tuple[str, ...]):
    """`aligned`: parameters that begin with a pointer to a multiple of 16 bytes. Types in the kernel's own order."""
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    hints = {(kernel.arg_names.index(name), 0): [["tt.divisibility", 16]] for name in aligned}
    return GluonASTSource(kernel, signature, constants, hints)
