"""`simulate`: the kernel of a problem, run on the CPU by the simulator: findings, values, timeline. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from warpattn.cli import spelling, tensors
from warpattn.cli.progress import working
from warpattn.cli.request import Request
from warpattn.errors import AttentionError
from warpattn.language.evaluate import evaluate_all
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.operands import Operands
from warpattn.reference import reference
from warpattn.sequences import Dense

SCHEDULES = ("eager", "lazy", "random", "adversarial")
LSE_LIMIT = 1e-3


def simulate_command(
    script: Annotated[Path | None, typer.Argument(help="A program whose kernels to run, instead of a problem")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments")] = None,
    shape: Annotated[str, typer.Option(help=spelling.SHAPE_HELP)] = "1x512x2x64",
    mask: Annotated[str, typer.Option(help=spelling.MASK_HELP)] = spelling.MASK,
    score: Annotated[str, typer.Option(help=spelling.SCORE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16")] = "bf16",
    arch: Annotated[str, typer.Option(help=f"Architecture: {spelling.ARCH_HELP}")] = "sm90",
    schedule: Annotated[str, typer.Option(help=f"Order of asynchronous work: {', '.join(SCHEDULES)}")] = "lazy",
    seed: Annotated[int, typer.Option(help=f"{spelling.SEED_HELP}, and of the random schedule")] = 0,
    seeds: Annotated[int, typer.Option(help="Of a script: how many runs under the random schedule")] = 1,
    timeline: Annotated[Path | None, typer.Option(help="Write an SVG picture of one program, or a .json trace")] = None,
) -> None:
    """Run the kernel of a problem, or those of a script, in the simulator; exits with 1 on findings or wrong values."""
    if script is not None:
        from warpattn.cli.script import simulate_script  # imports NumPy and Triton

        _check_timeline(timeline)
        console = Console(highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(simulate_script(script, arguments or [], arch, seeds, timeline, console))
    if schedule not in SCHEDULES:
        raise AttentionError(f"schedule is {schedule!r}; write {', '.join(SCHEDULES)}")
    _check_timeline(timeline)
    kind, request = spelling.half(dtype), Request(shape, mask, score, dtype)
    request.checked(arch)  # refuses before any memory is filled
    q, k, v = tensors.random(spelling.shape(shape), spelling.seed(seed), kind)
    options = {"mask": spelling.mask(mask), "score": spelling.score(score, q.shape[2])}
    backend = f"simulate:{arch}"
    checked = validate(Call(q, k, v, Dense(), **options, return_lse=True, backend=backend))
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=kind)
    lse = torch.full(checked.lse_shape, torch.nan)
    console = Console(highlight=False, soft_wrap=True)
    note = spelling.default_note(mask)
    console.print(f"q {_size(q)}  k {_size(k)}  {dtype}  mask {mask}{note}  score {score or 'none'}  on {backend}")
    weights = keys_of_rows(checked)
    with working(f"compiling and simulating the {arch} kernel", lambda: finished(out, weights)):
        from warpattn.runtime import simulate  # imports NumPy and Triton

        timed = timeline is not None  # of one program, whose picture has every tile
        chosen = simulate.Options(schedule, seed, timed, 1 if timed else simulate.PROGRAMS)
        report = simulate.traced(checked, Operands(q, k, v, out, lse, None), chosen)
    with working("comparing with the reference"):
        expected, expected_lse = reference(q, k, v, **options)
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


def keys_of_rows(checked: CheckedCall) -> Tensor:
    """How many keys the mask's interval has for each row (at least 1), which is about what a row costs."""
    p = checked.problem
    rows = torch.arange(p.seq_q) + (p.seq_k - p.seq_q)
    at = {"b": 0, "h": 0, "len_q": p.seq_q, "len_k": p.seq_k, "q_lo": rows, "q_hi": rows}
    first, _, _, last = evaluate_all(checked.mask.span, at, checked.mask.tensors)
    return torch.as_tensor(last - first).expand(p.seq_q).clamp(min=1).float()


def finished(out: Tensor, weights: Tensor) -> float:
    """The part of the rows of `out` (B, Sq, Hq, Dv) that are no longer NaN, weighted."""
    written = ~out[..., 0].isnan()
    return float((written * weights[:, None]).sum() / (weights.sum() * written.shape[0] * written.shape[2]))


def _check_timeline(path: Path | None) -> None:
    """Before minutes of work: the file's type, and the folder it goes to."""
    if path is not None:
        if path.suffix not in (".svg", ".json"):
            raise AttentionError(f"timeline is {str(path)!r}; write a name that ends with .svg or .json")
        tensors.check_writable(path)


def _size(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


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
