"""compile_for(): a Gluon or Triton kernel compiled for a named chip, without the chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import SimulationError

ARCHS = {
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}


@dataclass(frozen=True)
class Compiled:
    """A kernel that was compiled as far as TTGIR, which is what the simulator runs."""

    name: str
    asm: Mapping[str, str]


def compile_for(
    arch: str,
    kernel: Any,
    signature: Mapping[str, Any],
    constexprs: Mapping[str, Any] | None = None,
    num_warps: int = 4,
    machine_code: bool = False,
    num_ctas: int = 1,
) -> Any:
    """Compile `kernel` (a @gluon.jit or @triton.jit function) for sm90, sm100, gfx942 or gfx950; needs no GPU.

    signature: type of every parameter as Triton spells it ("*fp32", "i32", "tensordesc<…>", "constexpr"); constexprs:
    the values of those that are constexpr. With `machine_code` this is triton.compile (seconds, cached on disk) and
    returns its kernel; without, compilation stops at TTGIR (tenths of a second). num_ctas: of a cluster (sm90, sm100).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon import GluonASTSource
    from triton.experimental.gluon._runtime import GluonJITFunction

    if arch not in ARCHS:
        raise SimulationError(f"arch is {arch!r}; it must be one of {', '.join(ARCHS)}")
    target = GPUTarget(*ARCHS[arch])
    constants = dict(constexprs or {})
    attributes = _attributes(kernel, signature) if target.backend == "hip" else {}
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    if kind is ASTSource:
        constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = kind(kernel, dict(signature), constants, attributes)
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": True}
    options |= {"num_ctas": num_ctas} if num_ctas > 1 else {}
    if machine_code:
        return triton.compile(source, target=target, options=options)
    return to_ttgir(source, target, options)


def to_ttgir(source: Any, target: Any, options: dict[str, Any]) -> Compiled:
    """The stages of triton.compile up to TTGIR, with its parameters."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend: Any = make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(parsed)
    module = source.make_ir(target, parsed, functions, backend.get_module_map(), context)
    metadata = {"target": target, **parsed.__dict__}
    names = list(stages)
    for name in names[names.index(source.ext) : names.index("ttgir") + 1]:
        module = stages[name](module, metadata)
    return Compiled(source.name, {"ttgir": str(module)})


def _attributes(kernel: Any, signature: Mapping[str, Any]) -> dict[tuple[int, ...], list[list[Any]]]:
    """What AMD's backend needs to know about pointers before it uses buffer operations."""
    hints = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
    pointers = [i for i, name in enumerate(kernel.arg_names) if str(signature.get(name, "")).startswith("*")]
    return {(i,): hints for i in pointers}
