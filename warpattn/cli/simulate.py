"""`simulate`: the kernel of a problem, run on the CPU by the simulator: findings, values, timeline. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from warpattn.cli import spelling, tensors
from warpattn.problem import Call, validate
from warpattn.problem.operands import Operands
from warpattn.reference import reference
from warpattn.sequences import Dense

SCHEDULES = ("eager", "lazy", "random", "adversarial")
LSE_LIMIT = 1e-3


def simulate_command(
    shape: Annotated[str, typer.Option(help=spelling.SHAPE_HELP)] = "1x512x2x64",
    mask: Annotated[str, typer.Option(help=spelling.MASK_HELP)] = "causal",
    score: Annotated[str, typer.Option(help=spelling.SCORE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16")] = "bf16",
    arch: Annotated[str, typer.Option(help=f"Architecture: {spelling.ARCH_HELP}")] = "sm90",
    schedule: Annotated[str, typer.Option(help=f"Order of asynchronous work: {', '.join(SCHEDULES)}")] = "lazy",
    seed: Annotated[int, typer.Option(help="Seed of the tensors and of the random schedule")] = 0,
    timeline: Annotated[Path | None, typer.Option(help="Write an SVG picture of one program, or a .json trace")] = None,
) -> None:
    """Run the kernel of a problem in the simulator; exits with 1 on findings or wrong values."""
    if schedule not in SCHEDULES:
        raise typer.BadParameter(f"schedule {schedule!r}: write {', '.join(SCHEDULES)}")
    _check_timeline(timeline)
    size, kind = spelling.shape(shape), spelling.half(dtype)
    q, k, v = (x.to(kind) for x in tensors.random(size, seed))
    options = {"mask": spelling.mask(mask), "score": spelling.score(score, size.heads_q)}
    backend = f"simulate:{spelling.arch(arch)}"
    checked = validate(Call(q, k, v, Dense(), **options, return_lse=True, backend=backend))
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=kind)
    lse = torch.full(checked.lse_shape, torch.nan)
    console = Console(highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("compile and simulate", total=2)
        from warpattn.runtime import simulate  # imports NumPy and Triton

        timed = timeline is not None  # of one program, whose picture has every tile
        chosen = simulate.Options(schedule, seed, timed, 1 if timed else simulate.PROGRAMS)
        report = simulate.traced(checked, Operands(q, k, v, out, lse, None), chosen)
        progress.update(task, advance=1, description="reference")
        expected, expected_lse = reference(q, k, v, **options)
        progress.advance(task)
    console.print(
        f"q {tuple(q.shape)}  k {tuple(k.shape)}  {dtype}  mask {mask}  score {score or 'none'}  on {backend}"
    )
    console.print(f"{report.steps} steps in {report.seconds:.2f} s, schedule {schedule}, seed {seed}")
    if report.findings:
        console.print(findings_table(report.findings), soft_wrap=False)
    else:
        console.print("no findings")
    limit = torch.finfo(kind).eps * float(v.float().abs().max())  # of rounding P and the output, half of it each
    right = agree(console, "out", (out, expected), limit) & agree(console, "lse", (lse, expected_lse), LSE_LIMIT)
    if timeline is not None and report.timing is not None:
        write = report.save_trace if timeline.suffix == ".json" else report.save_timeline
        write(timeline)
        console.print(f"{report.timing.cycles:.0f} cycles by the model of {report.timing.chip}; wrote {timeline}")
    if report.findings or not right:
        raise typer.Exit(1)


def _check_timeline(path: Path | None) -> None:
    """Before minutes of work: the file's type, and the folder it goes to."""
    if path is not None and path.suffix not in (".svg", ".json"):
        raise typer.BadParameter(f"timeline {str(path)!r}: write a name that ends with .svg or .json")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"timeline {str(path)!r}: there is no folder {str(path.parent)!r}")


def findings_table(findings: list) -> Table:
    """One row per finding: kind, how often, roles and lines, what it says."""
    table = Table(show_lines=True)
    for name in ("kind", "times", "where", "finding"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        places = (f"{p.role} {p.frames[0].file.rsplit('/', 1)[-1]}:{p.line}" for p in finding.places if p.frames)
        table.add_row(finding.kind, str(finding.count), "\n".join(places), finding.message)
    return table


def agree(console: Console, name: str, pair: tuple[Tensor, Tensor], limit: float) -> bool:
    """Print the largest difference from the reference; whether it is within the limit. Equal infinities agree."""
    found, expected = pair[0].float(), pair[1].float()
    difference = float(torch.where(found == expected, 0.0, (found - expected).abs()).nan_to_num(nan=torch.inf).max())
    right = difference <= limit
    console.print(
        f"{name}  largest difference {difference:.2e}, at most {limit:.0e} expected{'' if right else ': WRONG'}"
    )
    return right
