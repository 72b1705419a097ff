"""`compile`: what a problem's kernel becomes on the machine: registers, spills, memory, instructions. Needs no GPU."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from warpattn import sass
from warpattn.cli import spelling
from warpattn.cli.plan import checked
from warpattn.plan import plan

# What an attention kernel is made of; the rest is counted as one line.
NOTABLE = {
    "HGMMA": "matrix products (wgmma)",
    "UTMALDG": "TMA loads",
    "UTMASTG": "TMA stores",
    "SYNCS": "mbarrier operations",
    "BAR": "named barriers",
    "MUFU": "exp2, log2 and reciprocals",
    "FFMA": "fp32 multiply-adds",
    "F2FP": "conversions to 16 bits",
    "USETMAXREG": "register reallocations",
    "STL": "spill stores",
    "LDL": "spill loads",
}


def compile_command(
    shape: Annotated[str, typer.Option(help=spelling.SHAPE_HELP)] = "4x4096x16x128",
    mask: Annotated[str, typer.Option(help=spelling.MASK_HELP)] = "causal",
    score: Annotated[str, typer.Option(help=spelling.SCORE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16")] = "bf16",
    arch: Annotated[str, typer.Option(help=f"Architecture: {spelling.ARCH_HELP}")] = "sm90",
    opcodes: Annotated[bool, typer.Option("--opcodes", help="Count every instruction, with its modifiers")] = False,
) -> None:
    """Compile a problem's kernel and print what it occupies and is made of."""
    ready = checked(shape, mask, score, dtype)
    chosen = plan(ready.problem, arch=spelling.arch(arch))
    from warpattn.launch import compile_plan  # imports Triton, which the other commands do without

    start = time.perf_counter()
    kernel = compile_plan(chosen, ready.mask, ready.score)
    seconds = time.perf_counter() - start
    cubin = kernel.asm["cubin"]
    found, counts = sass.resources(cubin), sass.opcode_counts(cubin, modifiers=opcodes)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(str(chosen))
    table = Table(title=f"{arch}, compiled in {seconds:.1f} s", show_header=False)
    table.add_row("registers per thread at launch", str(found.registers))
    table.add_row("stack, bytes per thread", str(found.stack))
    table.add_row("spill stores + loads", f"{found.spill_stores} + {found.spill_loads}")
    table.add_row("shared memory, bytes per CTA", f"{kernel.metadata.shared:,}")
    table.add_row("warps", str(kernel.metadata.num_warps))
    table.add_row("machine code, instructions", f"{counts.total():,}")
    table.add_section()
    for name, count in counts.most_common() if opcodes else [(name, counts[name]) for name in NOTABLE]:
        if count:
            table.add_row(name if opcodes else f"{name}  {NOTABLE[name]}", f"{count:,}")
    console.print(table)
