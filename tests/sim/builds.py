"""Compiles test kernels for the simulator, each once: signatures are read off the arguments."""

from functools import cache
from typing import Any

import numpy as np

from warpattn.sim import PointerTable, Report, TensorDescriptor, compile_for, simulate

_TYPES = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int8": "i8", "int16": "i16",
    "int32": "i32", "int64": "i64", "uint8": "u8", "uint32": "u32", "uint64": "u64",
    "float8_e5m2": "fp8e5", "float8_e4m3fn": "fp8e4nv", "float8_e4m3fnuz": "fp8e4b8", "float8_e5m2fnuz": "fp8e5b16",
}  # fmt: skip


@cache
def compiled(
    kernel: Any, signature: tuple, constants: tuple, num_warps: int, arch: str = "sm90", num_ctas: int = 1
) -> Any:
    """The kernel for an architecture, down to TTGIR."""
    return compile_for(arch, kernel, dict(signature), dict(constants), num_warps, num_ctas=num_ctas)


def type_of(value: Any, layout: Any = None) -> str:
    """Triton's name for the type of an argument."""
    if isinstance(value, TensorDescriptor):
        dtype = _TYPES[str(value.tensor.dtype).removeprefix("torch.")]
        return f"tensordesc<{dtype}{list(value.box)},{layout!r}>"
    if isinstance(value, PointerTable):
        return "*i64"
    if isinstance(value, int):
        return "i32"
    if isinstance(value, float):
        return "fp32"
    return "*" + _TYPES[str(value.dtype).removeprefix("torch.")]


def build(kernel: Any, args: dict, constants: dict | None = None, **options: Any) -> Any:
    """The kernel for the types of `args`; `layout`: of every descriptor's tiles, or of each by name."""
    constants, layout = constants or {}, options.get("layout")
    layouts = layout if isinstance(layout, dict) else dict.fromkeys(kernel.arg_names, layout)
    types = {name: type_of(value, layouts.get(name)) for name, value in args.items()}
    signature = tuple((name, "constexpr" if name in constants else types[name]) for name in kernel.arg_names)
    num_warps, arch = options.get("num_warps", 4), options.get("arch", "sm90")
    return compiled(kernel, signature, tuple(constants.items()), num_warps, arch, options.get("num_ctas", 1))


def run(kernel: Any, grid: tuple, args: dict, constants: dict | None = None, **options: Any) -> Report:
    """Build for the types of `args`, and simulate; options of both."""
    chosen = {name: options.pop(name) for name in ("layout", "num_warps", "arch", "num_ctas") if name in options}
    return simulate(build(kernel, args, constants, **chosen), grid, args, **options)


def poison(shape: Any, dtype: Any = np.float32) -> np.ndarray:
    """An output that no correct result looks like."""
    return np.full(shape, np.nan if np.issubdtype(dtype, np.floating) else 77, dtype)
