"""`simulate`: the kernel of a problem, run on the CPU by the simulator: findings, values, timeline. Needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from warpattn.cli import spelling, tensors
from warpattn.cli.progress import working
from warpattn.cli.request import Request
from warpattn.cli.training import kernels
from warpattn.errors import AttentionError
from warpattn.language.evaluate import evaluate_all
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.operands import Operands
from warpattn.reference import reference
from warpattn.sequences import Dense
from warpattn.sim import Report

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
    backward: Annotated[bool, typer.Option("--backward", help=spelling.BACKWARD_HELP)] = False,
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
    request = Request(shape, mask, score, dtype, backward)
    request.checked(arch)  # refuses before any memory is filled
    q, k, v = tensors.random(spelling.shape(shape), spelling.seed(seed), spelling.half(dtype))
    tail = (spelling.mask(mask), spelling.score(score, q.shape[2]), None, None, True, None, f"simulate:{arch}")
    call = Call(q, k, v, Dense(), *tail)
    console = Console(highlight=False, soft_wrap=True)
    mask_text, what = f"{mask}{spelling.default_note(mask)}", "gradients  " if backward else ""
    head = f"q {_size(q)}  k {_size(k)}  {dtype}  mask {mask_text}  score {score or 'none'}  {what}on {call.backend}"
    console.print(head)
    order = (schedule, seed, timeline is not None)
    report, results = (_backward if backward else _forward)(call, order)
    console.print(f"{report.steps} steps in {report.seconds:.2f} s, schedule {schedule}, seed {seed}")
    if report.findings:
        console.print(findings_table(report.findings), soft_wrap=False)
    else:
        console.print("no findings")
    right = all([agree(console, result) for result in results])
    if timeline is not None and report.timing is not None:
        write = report.save_trace if timeline.suffix == ".json" else report.save_timeline
        write(timeline)
        console.print(f"{report.timing.cycles:.0f} cycles by the model of {report.timing.chip}; wrote {timeline}")
    if report.findings or not right:
        raise typer.Exit(1)


class Result(NamedTuple):
    """A tensor that kernels wrote, and what it should be."""

    name: str
    found: Tensor
    expected: Tensor
    limit: float


def _options(order: tuple[str, int, bool]) -> Any:
    """How to simulate: schedule, seed, and whether for a picture, which is of one program that has every tile."""
    from warpattn.runtime import simulate  # imports NumPy and Triton

    return simulate.Options(*order, 1 if order[2] else simulate.PROGRAMS)


def _forward(call: Call, order: tuple[str, int, bool]) -> tuple[Report, list[Result]]:
    """The report of a forward, out and lse."""
    q, v = call.q, call.v
    checked = validate(call)
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype)
    lse = torch.full(checked.lse_shape, torch.nan)
    weights = keys_of_rows(checked)
    with working(f"compiling and simulating the {_arch(call)} kernel", lambda: finished(out, weights)):
        from warpattn.runtime import simulate  # imports NumPy and Triton

        report = simulate.traced(checked, Operands(q, call.k, v, out, lse, None), _options(order))
    with working("comparing with the reference"):
        expected, expected_lse = reference(q, call.k, v, mask=call.mask, score=call.score)
    limit = torch.finfo(q.dtype).eps * float(v.float().abs().max())  # of rounding P and the output, half of it each
    return report, [Result("out", out, expected, limit), Result("lse", lse, expected_lse, LSE_LIMIT)]


def _backward(call: Call, order: tuple[str, int, bool]) -> tuple[Report, list[Result]]:
    """The report of a backward, dq, dk and dv of a random dout."""
    dout = tensors.random_like_out(call.q, call.v, order[1])
    with working(f"compiling and simulating the {_arch(call)} backward"):
        report, found = kernels.simulated(call, dout, _options(order))
    with working("comparing with the reference"):
        expected = kernels.truth(call, dout)
    # Of rounding out, P, dS and the gradient, each by half an eps of its largest value at most.
    limits = [2 * torch.finfo(call.q.dtype).eps * float(x.abs().max()) for x in expected]
    rows = zip(kernels.NAMES, found, expected, limits, strict=True)
    return report, [Result(*row) for row in rows]


def _arch(call: Call) -> str:
    return call.backend.removeprefix("simulate:")


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


def agree(console: Console, result: Result) -> bool:
    """Print the largest difference from the reference; whether it is within the limit. Equal infinities agree."""
    found, expected = result.found.float(), result.expected.float()
    difference = float(torch.where(found == expected, 0.0, (found - expected).abs()).nan_to_num(nan=torch.inf).max())
    right = difference <= result.limit
    at_most = f"at most {result.limit:.0e} expected{'' if right else ': WRONG'}"
    console.print(f"{result.name}  largest difference {difference:.2e}, {at_most}")
    return right
