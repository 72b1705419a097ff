"""compile_for(): a Gluon or Triton kernel compiled for a named chip, without the chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import SimulationError, of_type
from .ir.placement import BLOCK_BYTES
from .specialize import specialised

ARCHS = {
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "sm103": ("cuda", 103, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled to TTGIR, which the simulator runs."""

    name: str
    asm: Mapping[str, str]
    folded: Mapping[str, int] = field(default_factory=dict)  # integer parameters that are constants: always 1


def compile_for(
    arch: str,
    kernel: Any,
    signature: Mapping[str, Any],
    constexprs: Mapping[str, Any] | None = None,
    num_warps: int = 4,
    machine_code: bool = False,
    num_ctas: int = 1,
    num_stages: int | None = None,
) -> Any:
    """Compile `kernel` (a @gluon.jit or @triton.jit function) for sm90, sm100, sm103, gfx942 or gfx950; needs no GPU.

    signature: for every parameter a value, or a type as Triton spells it ("*fp32", "i32", "tensordesc<…>",
    "constexpr"). A value (a torch tensor or NumPy array, an integer, a float) is specialised as by a launch: for
    divisibility by 16, and the integer 1. A type is specialised as in Triton's compile tool: "i32:16" is divisible by
    16, "i32:1" is 1; by default an integer is any integer, and a pointer is divisible by 16 like those of fresh tensors
    ("*fp32:4" is not). constexprs: values of the constexpr parameters. num_stages: of Triton's pipelines; None: its
    default. num_ctas: of a cluster (not on AMD). With `machine_code` this is triton.compile (seconds, cached on disk)
    and returns its kernel; without, compilation stops at TTGIR (tenths of a second).

    Raises SimulationError for an unknown architecture and a signature that does not fit the kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon import GluonASTSource
    from triton.experimental.gluon._runtime import GluonJITFunction

    check_arch(arch)
    if not hasattr(kernel, "params"):
        raise SimulationError(f"kernel is {of_type(kernel)}; it must be a @triton.jit or @gluon.jit function")
    for name, value, most in (("num_warps", num_warps, 32), ("num_ctas", num_ctas, 16)):
        if type(value) is not int or value not in [1 << i for i in range(most.bit_length())]:
            raise SimulationError(f"{name} is {value!r}; it must be a power of two up to {most}")
    if num_stages is not None and (type(num_stages) is not int or num_stages < 1):
        raise SimulationError(f"num_stages is {num_stages!r}; it must be an integer from 1 on")
    for name, value in (("signature", signature), ("constexprs", constexprs or {})):
        if not isinstance(value, Mapping):
            raise SimulationError(f"{name} is {value!r}; it must map the names of parameters to values")
    target = GPUTarget(*ARCHS[arch])
    parameters = specialised(kernel.params, signature, dict(constexprs or {}), make_backend(target))
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(kernel, parameters.types, parameters.constants, parameters.attributes)
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": True}
    if num_ctas != 1:
        options["num_ctas"] = num_ctas
    if num_stages is not None:
        options["num_stages"] = num_stages
    if machine_code:
        return triton.compile(source, target=target, options=options)
    return replace(to_ttgir(source, target, options), folded=parameters.folded)


def block_bytes(arch: str) -> int:
    """Return the bytes of shared memory that a block may have."""
    backend, chip, _ = ARCHS[arch]
    return BLOCK_BYTES[f"{backend}:{chip}"]


def check_arch(arch: Any) -> None:
    """Raise SimulationError for a chip that is not simulated."""
    if not isinstance(arch, str) or arch not in ARCHS:
        raise SimulationError(f"arch is {arch!r}; it must be one of {', '.join(ARCHS)}")


def to_ttgir(source: Any, target: Any, options: dict[str, Any]) -> Compiled:
    """Run the stages of triton.compile up to TTGIR, with its parameters."""
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
