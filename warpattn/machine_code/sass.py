"""Reads NVIDIA machine code: registers, stack, shared memory, spills and instruction counts of a cubin.

A kernel that compiles can still be slow: a spilled register in the inner loop, or a `wgmma` that became a chain of
FMAs, changes no value. These functions show it on a machine without the card; `python -m warpattn compile` prints their
results, and tests check them for every shipped configuration.

The disassemblers (`cuobjdump`) come with Triton's wheel, so nothing has to be installed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_RESOURCE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
#         /*00e0*/              @!P2 LDG.E R0, desc[UR4][R4.64] ;    ->    LDG.E
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel, as its cubin states them.

    registers: registers per thread at launch (before any `setmaxnreg`).
    stack: bytes of stack per thread; 0 in a healthy kernel.
    local: bytes of local memory per thread outside the stack.
    shared: bytes of *static* shared memory; Triton's own are requested at launch (`kernel.metadata.shared`).
    spill_stores, spill_loads: instructions that write or read local memory (STL, LDL).
    """

    registers: int
    stack: int
    local: int
    shared: int
    spill_stores: int
    spill_loads: int

    @property
    def spills(self) -> int:
        """Number of instructions that move registers to local memory or back."""
        return self.spill_stores + self.spill_loads


def resources(cubin: bytes) -> Resources:
    """Read registers per thread, stack, memory and spills of a cubin that holds one kernel.

    Raises ValueError when `cubin` is not a cubin or holds no kernel.
    """
    # Each function prints one line such as "REG:14 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:568"; a kernel has one.
    lines = [dict(_RESOURCE.findall(line)) for line in _cuobjdump(cubin, "-res-usage").splitlines()]
    found = [{name: int(value) for name, value in line.items()} for line in lines if "REG" in line]
    if not found:
        raise ValueError(f"cubin of {len(cubin)} bytes names no kernel; give kernel.asm['cubin']")
    largest = max(found, key=lambda line: line["REG"])
    counts = opcode_counts(cubin)
    return Resources(
        registers=largest["REG"],
        stack=largest["STACK"],
        local=largest["LOCAL"],
        shared=largest["SHARED"],
        spill_stores=counts["STL"],
        spill_loads=counts["LDL"],
    )


def opcode_counts(cubin: bytes, *, modifiers: bool = False) -> Counter[str]:
    """Count each instruction in the machine code of a cubin.

    By default instructions are counted under their first name ("HGMMA"); with `modifiers` under their full spelling
    ("HGMMA.64x128x16.F32.BF16"). Raises ValueError when `cubin` is not a cubin.
    """
    names = _INSTRUCTION.findall(disassembled(cubin))
    return Counter(names if modifiers else (name.split(".", 1)[0] for name in names))


def disassembled(cubin: bytes) -> str:
    """Return the machine code of a cubin as text."""
    return _cuobjdump(cubin, "-sass")


def _cuobjdump(cubin: bytes, option: str) -> str:
    """Return what Triton's own cuobjdump prints about `cubin`."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, option, path], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"cubin of {len(cubin)} bytes cannot be read: {done.stderr.strip() or 'cuobjdump failed'}")
    return done.stdout
