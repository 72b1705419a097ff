"""Runs compiled Gluon and Triton kernels on a CPU, with real asynchrony, and reports their errors.

    kernel = compile_for("sm90", my_kernel, signature={...}, constexprs={...})
    report = simulate(kernel, grid=(4,), args={"x": x, ...}, schedule="lazy")
    print(report)

NumPy executes the TTGIR that Triton compiled. The unit is the role (a partition of `warp_specialize`, or the whole
program): its warps run in lockstep, so barriers between them have no effect here, nor have bank conflicts or swizzles.
Asynchronous copies and matrix products run when the schedule says, and vector clocks tell whether accesses of the same
bytes are ordered. It runs any kernel: nothing here depends on the kernels of this project.
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
