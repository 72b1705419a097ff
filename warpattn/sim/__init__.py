"""Runs compiled Gluon and Triton kernels on a CPU, with real asynchrony, and reports what they do wrong.

    kernel = compile_for("sm90", my_kernel, signature={...}, constexprs={...})
    report = simulate(kernel, grid=(4,), args={"x": x, ...}, schedule="lazy")
    print(report)

The TTGIR that Triton compiled is executed with NumPy. The unit is the role (a partition of `warp_specialize`, or the
whole program): its warps go in step, so barriers between them mean nothing here, nor do bank conflicts or swizzles.
Asynchronous copies and matrix products run when the schedule says, and vector clocks tell whether anything orders what
touches the same bytes. It is for any kernel: nothing here knows the kernels of this project.
"""

from .arguments import PointerTable
from .compile import compile_for
from .errors import SimulationError
from .knockout import KnockOut, knock_out, loosen_waits, miscount
from .memory.descriptor import TensorDescriptor
from .memory.findings import Finding
from .ops.asm import elementwise, whole
from .report import Report
from .simulate import DependentGrid, simulate

__all__ = [
    "DependentGrid",
    "Finding",
    "KnockOut",
    "PointerTable",
    "Report",
    "SimulationError",
    "TensorDescriptor",
    "compile_for",
    "elementwise",
    "knock_out",
    "loosen_waits",
    "miscount",
    "simulate",
    "whole",
]
