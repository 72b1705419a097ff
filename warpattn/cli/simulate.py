"""`simulate`: runs a problem's kernel in the simulator: findings, values, timeline. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from warpattn.cli import effort, spelling, tensors
from warpattn.cli.progress import working
from warpattn.cli.request import Request, are, given
from warpattn.cli.training import kernels
from warpattn.errors import AttentionError, many
from warpattn.problem import Call, validate
from warpattn.problem.operands import Operands
from warpattn.quantized import EIGHT_BIT, dequantized, quantize, split
from warpattn.reference import reference
from warpattn.sequences import Dense
from warpattn.sim import Report
from warpattn.sim.sweep import SCHEDULES, Order, orders_of, silent, sweep

SCHEDULES_HELP = f"Orders of asynchronous work: all, or of {', '.join(SCHEDULES)}, with commas"
SEEDS = 4  # of the random schedule: seven runs in all, a second for the README's shapes
LSE_LIMIT = 1e-3
OF_A_PROBLEM = ("shape", "mask", "score", "dtype", "kv_dtype", "backward")


def simulate_command(
    ctx: typer.Context,
    program: Annotated[
        list[str] | None, typer.Argument(help="A script whose kernels to run, and its arguments")
    ] = None,
    shape: Annotated[str, typer.Option(help=spelling.SHAPE_HELP)] = "1x512x2x64",
    mask: Annotated[str, typer.Option(help=spelling.MASK_HELP)] = spelling.MASK,
    score: Annotated[str, typer.Option(help=spelling.SCORE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help=spelling.OPERAND_HELP)] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help=f"8-bit keys and values: {spelling.STORED_HELP}")] = "",
    arch: Annotated[str, typer.Option(help=f"Architecture: {spelling.ARCH_HELP}")] = "sm90",
    schedules: Annotated[str, typer.Option("--schedules", "--schedule", help=SCHEDULES_HELP)] = "all",
    seed: Annotated[int, typer.Option(help=f"{spelling.SEED_HELP}, and the first of the random schedule")] = 0,
    seeds: Annotated[int, typer.Option(help="Runs under the random schedule; 0: 4 with all schedules, else 1")] = 0,
    timeline: Annotated[Path | None, typer.Option(help="Write an SVG picture of one program, or a .json trace")] = None,
    report: Annotated[Path | None, typer.Option(help="Write what was found to an .html page or to .json")] = None,
    backward: Annotated[bool, typer.Option("--backward", help=spelling.BACKWARD_HELP)] = False,
) -> None:
    """Run the kernel of a problem, or those of a script, in the simulator; exits with 1 on findings or wrong values."""
    _check_written("timeline", timeline, (".svg", ".json"))
    _check_written("report", report, (".html", ".json"))
    names_and_seeds = _orders(schedules, seeds, seed)
    _refuse_idle(ctx, names_and_seeds[0])
    if program:
        from warpattn.cli.script import simulate_script  # imports NumPy and Triton

        console = Console(highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(simulate_script(program, arch, names_and_seeds, (timeline, report), console))
    request = Request(shape, mask, score, dtype, backward, kv_dtype)
    checked, orders = request.checked(arch), orders_of(*names_and_seeds)  # raises before any memory is filled
    kind, size = spelling.operand(dtype), spelling.shape(shape)
    effort.announce(size, checked, backward, len(orders))
    sequence, (q, k, v) = Dense(), tensors.random(size, spelling.seed(seed), None if kind in EIGHT_BIT else kind)
    stored = spelling.stored(kv_dtype)
    if kind in EIGHT_BIT:
        sequence, (q, k, v) = tensors.in_eight_bits((q, k, v), kind)
    elif stored is not None:
        (k, k_scale), (v, v_scale) = (split(quantize(x, stored)) for x in (k, v))
        sequence = Dense(k_scale, v_scale)
    tail = (spelling.mask(mask), spelling.score(score, q.shape[2]), None, None, True, None, f"simulate:{arch}")
    call = Call(q, k, v, sequence, *tail)
    console = Console(highlight=False, soft_wrap=True)
    mask_text, what = f"{mask}{spelling.default_note(mask)}", "gradients  " if backward else ""
    over = f"{dtype} over {kv_dtype}" if kv_dtype else dtype
    head = f"q {_size(q)}  k {_size(k)}  {over}  mask {mask_text}  score {score or 'none'}  {what}on {call.backend}"
    console.print(head)
    found, results = (_backward if backward else _forward)(call, Sweep(orders, timeline is not None))
    console.print(f"{many(found.steps, 'step')} in {found.seconds:.2f} s, {_spelled(*names_and_seeds)}")
    if found.findings:
        console.print(findings_table(found.findings), soft_wrap=False)
    else:
        console.print("no findings")
    right = all([agree(console, result) for result in results])
    _write(found, timeline, report, console)
    if found.findings or not right:
        raise typer.Exit(1)


def _write(found: Report, timeline: Path | None, report: Path | None, console: Console) -> None:
    """Write the files that the options name."""
    if timeline is not None and found.timing is not None:
        write = found.save_trace if timeline.suffix == ".json" else found.save_timeline
        with tensors.writing(timeline):
            write(timeline)
        busy = ", ".join(f"{engine} {share:.0%}" for engine, share in found.timing.busiest())
        console.print(f"{found.timing.cycles:.0f} cycles by the model of {found.timing.chip}, busiest: {busy}")
        console.print(f"wrote {timeline}")
    if report is not None:
        with tensors.writing(report):
            found.save_report(report)
        console.print(f"wrote {report}")


class Result(NamedTuple):
    """A tensor that kernels wrote: its largest difference from the expected one over all runs, and the limit."""

    name: str
    difference: float
    limit: float


class Sweep(NamedTuple):
    """The orders to run a problem in, and whether to predict the times of the first run."""

    orders: tuple[Order, ...]
    timed: bool

    def options(self, order: Order, first: bool) -> Any:
        """Return the options of one run; a timeline is of one program that has every tile."""
        from warpattn.runtime import simulate  # imports NumPy and Triton

        timed = self.timed and first
        return simulate.Options(*order, timed, 1 if timed else simulate.PROGRAMS)


def _orders(schedules: str, seeds: int, first: int) -> tuple[tuple[str, ...], range]:
    """Return the schedules that the options name, and the seeds of the random one."""
    names = SCHEDULES if schedules == "all" else tuple(schedules.split(","))
    for name in names:
        if name not in SCHEDULES:
            raise AttentionError(f"schedule is {name!r}; write {', '.join(SCHEDULES)} or all")
    if seeds < 0:
        raise AttentionError(f"seeds is {seeds}; it must be 0 or more")
    spelling.seed(first)
    return names, range(first, first + (seeds or (SEEDS if schedules == "all" else 1)))


def _refuse_idle(ctx: typer.Context, schedules: Sequence[str]) -> None:
    """Raise AttentionError for options without effect: seeds of no run, and those of a problem beside a script."""
    script = ctx.params["program"]
    if script and (idle := given(ctx, OF_A_PROBLEM)):
        rule = "a script has problems of its own; options for it follow --"
        raise AttentionError(f"{are(idle)} given beside the script {script[0]!r}; {rule}")
    seeds = ("seeds", "seed") if script else ("seeds",)  # a problem's tensors have a seed, too
    if "random" not in schedules and (idle := given(ctx, seeds)):
        rule = "only the random schedule has seeds"
        raise AttentionError(f"{are(idle)} given with --schedules {','.join(schedules)}; {rule}")


def _spelled(names: tuple[str, ...], seeds: range) -> str:
    """Put the runs into words, for the line below the head."""
    drawn = f"random (seeds {seeds[0]} to {seeds[-1]})" if len(seeds) > 1 else f"random (seed {seeds[0]})"
    return f"schedule{'s' * (len(names) > 1)} " + ", ".join(drawn if name == "random" else name for name in names)


def _forward(call: Call, swept: Sweep) -> tuple[Report, list[Result]]:
    """Simulate a forward; return the report, and the results for out and lse."""
    from warpattn.runtime import simulate  # imports NumPy and Triton

    q, k, v = call.q, call.k, call.v
    checked = validate(call)
    with working("computing the reference"):
        expected = reference(q, k, v, sequence=call.sequence, mask=call.mask, score=call.score)
        limit = _limit(call, checked.problem.dtype, expected[0])
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=checked.problem.dtype)
    lse = torch.empty(checked.lse_shape)
    found: list[tuple[float, ...]] = []
    weights = effort.keys_of_rows(checked)

    def single(order: Order, first: bool) -> Report:
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        operands = Operands(q, k, v, out, lse, None)
        report = simulate.traced(checked, operands, swept.options(order, first), call.sequence)
        found.append(tuple(map(largest_difference, (out, lse), expected)))
        return report

    def done() -> float:
        return (len(found) + finished(out, weights)) / len(swept.orders)

    report = _watched(f"compiling and simulating the {_arch(call)} kernel", done, swept, single)
    return report, _worst(("out", "lse"), found, (limit, LSE_LIMIT))


def _limit(call: Call, dtype: torch.dtype, out: Tensor) -> float:
    """Return the largest difference of an output of `dtype` from `out` that rounding explains: half an eps of each
    weight and half an eps of the output."""
    q, k, v = call.q, call.k, call.v
    if q.dtype not in EIGHT_BIT:
        return torch.finfo(dtype).eps * float(dequantized(v, call.sequence.v_scale).float().abs().max())
    # Weights have the three bits of e4m3. Their errors are as large as this if all have one sign, so the sum leaves
    # room for weights that are too small for three bits.
    sizes, _ = reference(q, k, v.float().abs().to(v.dtype), sequence=call.sequence, mask=call.mask, score=call.score)
    parts = ((torch.float8_e4m3fn, sizes), (dtype, out))
    return sum(torch.finfo(kind).eps / 2 * float(x.abs().max()) for kind, x in parts)


def _backward(call: Call, swept: Sweep) -> tuple[Report, list[Result]]:
    """Simulate a backward for a random dout; return the report, and the results for dq, dk and dv."""
    dout = tensors.random_like_out(call.q, call.v, swept.orders[0].seed)
    with working("computing the reference"):
        expected = kernels.truth(call, dout)
    found: list[tuple[float, ...]] = []

    def single(order: Order, first: bool) -> Report:
        report, taken = kernels.simulated(call, dout, swept.options(order, first))
        found.append(tuple(map(largest_difference, taken, expected)))
        return report

    def done() -> float:
        return len(found) / len(swept.orders)

    report = _watched(f"compiling and simulating the {_arch(call)} backward", done, swept, single)
    # From rounding out, P, dS and the gradient, each by at most half an eps of its largest value.
    limits = tuple(2 * torch.finfo(call.q.dtype).eps * float(x.abs().max()) for x in expected)
    return report, _worst(kernels.NAMES, found, limits)


def _watched(what: str, done: Callable[[], float], swept: Sweep, single: Callable[[Order, bool], Report]) -> Report:
    """Do all runs with one line of progress; return their report."""
    with silent(), working(what, done):
        return sweep(swept.orders, single)


def _worst(names: Sequence[str], found: Sequence[tuple[float, ...]], limits: Sequence[float]) -> list[Result]:
    """Return the largest difference of all runs for each tensor."""
    return [Result(name, max(run[i] for run in found), limits[i]) for i, name in enumerate(names)]


def _arch(call: Call) -> str:
    return call.backend.removeprefix("simulate:")


def finished(out: Tensor, weights: Tensor) -> float:
    """Return the weighted part of the rows of `out` (B, Sq, Hq, Dv) that are no longer NaN."""
    written = ~out[..., 0].isnan()
    return float((written * weights[:, None]).sum() / (weights.sum() * written.shape[0] * written.shape[2]))


def _check_written(option: str, path: Path | None, suffixes: tuple[str, str]) -> None:
    """Check a file's type and folder, before minutes of work."""
    if path is not None:
        if path.suffix not in suffixes:
            raise AttentionError(f"{option} is {str(path)!r}; write a name that ends with {' or '.join(suffixes)}")
        tensors.check_writable(path)


def _size(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def findings_table(findings: list) -> Table:
    """Make a table with a row per finding: kind, count, roles and lines, text, the run that repeats it."""
    table = Table(show_lines=True)
    for name in ("kind", "times", "where", "finding", "first in"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        places = (f"{p.role} {p.frames[0].file.rsplit('/', 1)[-1]}:{p.line}" for p in finding.places if p.frames)
        seen = str(finding.seen or "")
        table.add_row(finding.kind, str(finding.count), "\n".join(places), finding.message, seen)
    return table


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference between two tensors; infinite if one has NaN. Equal infinities agree."""
    found, expected = found.float(), expected.float()
    return float(torch.where(found == expected, 0.0, (found - expected).abs()).nan_to_num(nan=torch.inf).max())


def agree(console: Console, result: Result) -> bool:
    """Print the largest difference from the reference; return whether it is within the limit."""
    right = result.difference <= result.limit
    at_most = f"at most {result.limit:.0e} expected{'' if right else ': WRONG'}"
    console.print(f"{result.name}  largest difference {result.difference:.2e}, {at_most}")
    return right
