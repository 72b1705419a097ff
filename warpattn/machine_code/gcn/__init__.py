"""Reads AMD machine code, the text that Triton leaves in `kernel.asm["amdgcn"]`; needs no ROCm and no card.

    read(text) ─▶ Code: instructions in blocks, metadata    text.py
    summary(text) ─▶ registers, LDS, occupancy, counts      summary.py
    check_copies(text) ─▶ copies to LDS that are used or overwritten too early    copies.py

`python -m warpattn compile` prints `rows(text)`.
"""

from .copies import Check, Cover, Finding, check_copies
from .loads import EarlyUse, check_loads
from .summary import Summary, rows, summary
from .text import Code, Instruction, read

__all__ = [
    "Check",
    "Code",
    "Cover",
    "EarlyUse",
    "Finding",
    "Instruction",
    "Summary",
    "check_copies",
    "check_loads",
    "read",
    "rows",
    "summary",
]
