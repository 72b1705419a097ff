"""`compile`: shows a problem's compiled kernels: registers, spills, memory, instructions. Needs no GPU."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from warpattn.cli import spelling
from warpattn.cli.plan import print_plan
from warpattn.cli.progress import working
from warpattn.cli.request import Request
from warpattn.cli.training.kernels import backward_launches
from warpattn.errors import AttentionError
from warpattn.machine_code import gcn, sass
from warpattn.problem import CheckedCall
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime.launches import list_launches
from warpattn.runtime.plan import plan
from warpattn.runtime.training.plan import plan_backward
from warpattn.sequences import Dense

# Instructions that matter in an attention kernel; others are counted in one line.
NOTABLE = {
    "HGMMA": "matrix products (wgmma)",
    "QGMMA": "matrix products of 8 bits (wgmma)",
    "UTCHMMA": "matrix products (tcgen05)",
    "UTMALDG": "TMA loads",
    "UTMASTG": "TMA stores",
    "LDTM": "tensor memory loads",
    "STTM": "tensor memory stores",
    "UTCBAR": "commits of the tensor core",
    "SYNCS": "mbarrier operations",
    "BAR": "named barriers",
    "MUFU": "exp2, log2 and reciprocals",
    "FFMA": "fp32 multiply-adds",
    "FFMA2": "pairs of fp32 multiply-adds",
    "F2FP": "conversions to 16 bits",
    "USETMAXREG": "register reallocations",
    "STL": "spill stores",
    "LDL": "spill loads",
}


def compile_command(
    shape: Annotated[str, typer.Option(help=spelling.SHAPE_HELP)] = "4x4096x16x128",
    mask: Annotated[str, typer.Option(help=spelling.MASK_HELP)] = spelling.MASK,
    score: Annotated[str, typer.Option(help=spelling.SCORE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help=spelling.OPERAND_HELP)] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help=f"8-bit keys and values: {spelling.STORED_HELP}")] = "",
    arch: Annotated[str, typer.Option(help=f"Architecture: {spelling.ARCH_HELP}")] = "sm90",
    backward: Annotated[bool, typer.Option("--backward", help=spelling.BACKWARD_HELP)] = False,
    opcodes: Annotated[bool, typer.Option("--opcodes", help="Count every instruction, with its modifiers")] = False,
) -> None:
    """Compile a problem's kernels and print what they occupy and are made of."""
    request = Request(shape, mask, score, dtype, backward, kv_dtype)
    checked = request.checked(arch)
    from warpattn.runtime.compiler import compiled  # imports Triton, which other commands do not need

    console = Console(highlight=False, markup=False, soft_wrap=True)
    chosen = (plan_backward if backward else plan)(checked.problem, arch=arch)
    print_plan(console, f"{request}{spelling.default_note(mask)}", chosen)
    x = untouched(checked)
    for launch in backward_launches(checked, x) if backward else list_launches(checked, fitted(x), scales(checked)):
        start = time.perf_counter()
        with working(f"compiling {launch.name}"):
            kernel = compiled(launch)
        table = Table(title=f"{launch.name}, compiled in {time.perf_counter() - start:.1f} s", show_header=False)
        for row in code_rows(kernel, launch.name, arch, opcodes):
            table.add_row(*row)
        console.print(table)


def untouched(checked: CheckedCall) -> Operands:
    """Make tensors of a dense problem's shapes; their memory is never used."""
    p = checked.problem
    shapes = ((p.seq_q, p.heads_q, p.dim_qk), (p.seq_k, p.heads_kv, p.dim_qk), (p.seq_k, p.heads_kv, p.dim_v),
              (p.seq_q, p.heads_q, p.dim_v))  # fmt: skip
    try:
        stored = p.kv_dtype or p.dtype
        kinds = (p.q_dtype or p.dtype, stored, stored, p.dtype)
        q, k, v, out = (torch.empty(p.batch, *shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True))
    except RuntimeError:  # torch has no exception of its own for it
        largest = max(p.batch * math.prod(shape) * p.dtype.itemsize for shape in shapes)
        raise AttentionError(f"shape: a tensor of {largest / 2**30:,.0f} GiB cannot be had on this machine") from None
    return Operands(q, k, v, out, torch.empty(checked.lse_shape) if p.has_lse else None, None)


def scales(checked: CheckedCall) -> Dense:
    """Make the scales of a dense problem's tensors, if it has some."""
    return Dense(*(None if per is None else torch.ones(()) for per in checked.problem.scales))


def code_rows(kernel: Any, name: str, arch: str, opcodes: bool) -> list[tuple[str, str]]:
    """Describe machine code; raises AttentionError if it cannot be read, such as without space for temporary files."""
    try:
        return amd_rows(kernel, opcodes) if arch.startswith("gfx") else nvidia_rows(kernel, opcodes)
    except (OSError, ValueError) as error:
        raise AttentionError(f"the machine code of {name} cannot be read; {' '.join(str(error).split())}") from error


def nvidia_rows(kernel: Any, opcodes: bool) -> list[tuple[str, str]]:
    """Describe a cubin."""
    cubin = kernel.asm["cubin"]
    found, counts = sass.resources(cubin), sass.opcode_counts(cubin, modifiers=opcodes)
    rows = [
        ("registers per thread at launch", str(found.registers)),
        ("stack, bytes per thread", str(found.stack)),
        ("spill stores + loads", f"{found.spill_stores} + {found.spill_loads}"),
        ("shared memory, bytes per CTA", f"{kernel.metadata.shared:,}"),
        ("warps", str(kernel.metadata.num_warps)),
        ("machine code, instructions", f"{counts.total():,}"),
    ]
    if kernel.metadata.tmem_size:
        rows.insert(4, ("tensor memory, columns", str(kernel.metadata.tmem_size)))
    if opcodes:
        return rows + [(name, f"{count:,}") for name, count in counts.most_common()]
    return rows + [(f"{name}  {words}", f"{counts[name]:,}") for name, words in NOTABLE.items() if counts[name]]


def amd_rows(kernel: Any, opcodes: bool) -> list[tuple[str, str]]:
    """Describe a code object, and say whether its copies and stores to LDS are in order."""
    text = kernel.asm["amdgcn"]
    checked_copies = ("copies and stores to LDS, checked", verdict(gcn.check_copies(text)))
    return [*gcn.rows(text, kernel.metadata.shared, opcodes), checked_copies]


def verdict(check: gcn.Check) -> str:
    """Put the result of the static check into words."""
    if check.findings:
        return "; ".join(str(finding) for finding in check.findings)
    return "in order on every path" if check.proven else "nothing found, not every path explored"
