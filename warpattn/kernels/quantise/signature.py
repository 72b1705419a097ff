"""What Triton compiles to make 8-bit values."""

from __future__ import annotations

from triton.experimental.gluon import GluonASTSource

from warpattn.kernels.cache.config import Rows
from warpattn.problem.arch import TARGETS

from .config import QuantiseConfig, QuantiseShape
from .kernel import sizes_kernel, values_kernel

KERNELS = {"sizes": sizes_kernel, "values": values_kernel}
ALIGNED = [["tt.divisibility", 16]]


def quantise_source(name: str, element: str, stored: str, config: QuantiseConfig, arch: str) -> GluonASTSource:
    """The kernel of a name for tensors of an element's name, values of `stored`, for an architecture."""
    kernel = KERNELS[name]
    constants = {"config": config, "lanes": TARGETS[arch].lanes}
    strides = ("i64", "i64", "i64")
    known = {
        "x": Rows(f"*{element}", *strides), "values": Rows(f"*{stored}", *strides), "scale": Rows("*fp32", *strides),
        "sizes_ptr": "*fp32", "shape": QuantiseShape(*["i32"] * 4), **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    signature = {name: known[name] for name in kernel.arg_names}
    runs = {"x": config.run, "values": config.stored_run}
    vectors = [name for name, run in runs.items() if run > 1 and name in signature]
    hints = {(kernel.arg_names.index(name), 0): ALIGNED for name in vectors}
    return GluonASTSource(kernel, signature, constants, hints)
