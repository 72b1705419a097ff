"""`tune`: measures the configurations of given calls on this machine's card, and keeps the fastest for the planner.

    config or shapes ─▶ calls ─▶ candidates ─▶ compiled, each kernel once, on all cores
                                     └──────▶ values compared, timed in turns ─▶ a row a call ─▶ tuned/choices.json
"""

from __future__ import annotations

import datetime
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.inputs import kind_of
from warpattn.language.traced import whole
from warpattn.problem import CheckedCall, Problem
from warpattn.problem.arch import Arch
from warpattn.problem.backends import NEEDS, chip_of, target_here
from warpattn.problem.launch import BUILT_IN, Launch, PlanOptions
from warpattn.problem.operands import fitted
from warpattn.runtime import cache_folder, compiler, compilers, execute, kernel_cache
from warpattn.runtime.launches import filled_problem, list_launches
from warpattn.runtime.plan import plan
from warpattn.runtime.tuned import rows, table
from warpattn.runtime.tuned.rows import Row
from warpattn.runtime.tuned.timer import CardTimer, GraphLaunches, Timer
from warpattn.serving.call_shape import CallShape, TunedCall, shapes_of
from warpattn.serving.layers import LargestStep, Layer, check_step, layers_of, read_config

ARCH = table.TUNED_ARCHS[0]
ROUNDS = 15
LEAST_GAIN = 1.015  # speedup over the built-in choice that another must have: less is noise
COLD_BYTES = 128 * 2**20  # of inputs that calls use in turn, so that L2 does not hold the next call's
MOST_INPUTS = 8


@dataclass(frozen=True)
class Tuned:
    """What `tune` found for a call: a row, or None if its kernel has one configuration; `words` says it in text."""

    shape: CallShape
    row: Row | None
    words: str


class Kernel(NamedTuple):
    """A kernel that a candidate of a call needs."""

    shape: CallShape
    candidate: str
    position: int  # among the launches
    target: Arch | None = None  # see `PlanOptions`


def tune(
    what: str | PathLike[str] | Mapping[str, Any] | Sequence[Layer] | Sequence[CallShape],
    largest: LargestStep | None = None,
    *,
    rounds: int = ROUNDS,
    processes: int | None = None,
    timer: Timer | None = None,
    progress: Callable[[float], None] = lambda part: None,
) -> tuple[Tuned, ...]:
    """Time every configuration of some calls on this machine's card; later plans of such calls use the fastest.

    what: the calls; or, as in `warm`, a transformers config (a folder, a file, its dictionary) or layers: then a dense
    prompt of min(tokens, length) of `largest`, and a step of one token of all requests over pages, `length` keys each;
    default: 32 requests, 8192 tokens and keys, pages of 16. rounds: each runs all candidates once; medians count.
    processes: parallel compilers; None: one per core. timer: runs and times calls; None: on the current card.
    progress: called with the part done, 0 .. 1.

    Another configuration must be 1.5 % faster than the built-in one and give the same values except for rounding. Plans
    and calls with exactly these sizes, dtypes, mask and score use it from then on, in this process and others; existing
    plans and graphs keep theirs, and batch-invariant plans never use it. Rows are in the cache folder
    (tuned/choices.json), for one card and one version of kernels and Triton.

    Raises AttentionError for wrong arguments and calls that Hopper's kernels do not take, without a Hopper card, if
    rows cannot be kept, and if the built-in configuration itself fails.
    """
    check_step(largest, progress)
    if timer is not None and not hasattr(timer, "microseconds"):
        raise AttentionError(f"timer is {kind_of(timer)}; it must have device and microseconds, or be None")
    shapes = _shapes(what, largest)
    for name, value in (("rounds", rounds), ("processes", 1 if processes is None else processes)):
        if whole(value, 1) is None:
            raise AttentionError(f"{name} is {kind_of(value)}; it must be an int of at least 1")
    for shape in shapes:
        plan(_problem(shape), ARCH)  # raises for calls that the kernels do not take
    timer = timer or _card_timer()
    card = table.card_of(timer.device)
    if not card:
        raise AttentionError(f"timer runs on {timer.device}; it must run on a card")
    file = _file()
    failed = compile_all(shapes, processes, lambda part: progress(part / 2))
    found = []
    for done, shape in enumerate(shapes):
        step = partial(_part, progress, done, len(shapes))
        found.append(_tuned(shape, card, _Run(timer, rounds, failed, step)))
        if (row := found[-1].row) is not None:
            _keep(file, row)
    progress(1.0)
    return tuple(found)


def _shapes(what: Any, largest: LargestStep | None) -> Sequence[CallShape]:
    """Return the calls that the argument `what` of `tune` means."""
    if isinstance(what, (str, PathLike)):
        return shapes_of(layers_of(read_config(what)), largest)
    if isinstance(what, Mapping):
        return shapes_of(layers_of(what), largest)
    rule = "it must be a transformers config, a list of Layer or a list of CallShape"
    if not isinstance(what, Sequence) or not what:
        raise AttentionError(f"what is {kind_of(what)}; {rule}")
    if all(isinstance(shape, CallShape) for shape in what):
        if largest is not None:
            raise AttentionError("largest is given with shapes; they say their sizes themselves")
        return list(dict.fromkeys(what))
    if not all(isinstance(layer, Layer) for layer in what):
        raise AttentionError(f"what is {kind_of(what)}; {rule}")
    return shapes_of(what, largest)


def _card_timer() -> Timer:
    """Return a timer on the current card; raises AttentionError if it is no card that tune supports."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    chip = chip_of(device)
    if chip.target not in table.TUNED_ARCHS:
        has = f"has {chip.words}" if chip.words else "has no card"
        raise AttentionError(f"this machine {has}; tune measures on {NEEDS[ARCH]} (Hopper) alone")
    return CardTimer(device)


def _file() -> Path:
    """Return the file of rows; raises AttentionError if it cannot be kept or is damaged."""
    file, why = rows.path(), cache_folder.refusal(cache_folder.folder())
    if why or file is None:
        raise AttentionError(f"tuned choices cannot be kept: {why}")
    rows.read(file)
    return file


def _keep(file: Path, row: Row) -> None:
    """Write a row; plans and calls of this process then use it."""
    try:
        rows.add(file, [row])
    except OSError as error:
        raise AttentionError(f"tuned choices cannot be kept in {file}: {error.strerror or error}") from error
    table.TABLE.rows = None
    execute.forget()


def _part(progress: Callable[[float], None], done: int, count: int, part: float) -> None:
    """Report progress of measuring, which is the second half of the work."""
    progress(0.5 + 0.5 * (done + part) / count)


def compile_all(
    shapes: Iterable[CallShape], processes: int | None, progress: Callable[[float], None]
) -> dict[tuple[CallShape, str], str]:
    """Compile the kernels of all candidates, each once; return why some could not be compiled."""
    needed: dict[Path, list[Kernel]] = {}
    target = target_here(ARCH)
    for shape in shapes:
        for name in candidate_names(shape):
            options = PlanOptions(candidate=name, target=target)
            for position, launch in enumerate(_launches(shape.planned(), options)):
                file = kernel_cache.path_of(_key(launch))
                if file is not None and kernel_cache.load(file) is None:
                    needed.setdefault(file, []).append(Kernel(shape, name, position, target))
    # Others, such as those whose mask has a lambda, compile when they run.
    needed = {file: kernels for file, kernels in needed.items() if compilers.can_be_sent(kernels[0])}
    if not needed:
        return {}
    kernel_cache.require_triton()
    context = compilers.start(__name__)
    workers, failed = processes or os.cpu_count() or 1, {}
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(dict(os.environ),)) as pool:
        futures = {pool.submit(_compile, kernels[0]): kernels for kernels in needed.values()}
        for done, future in enumerate(as_completed(futures), 1):
            if error := future.exception():
                failed |= {(kernel.shape, kernel.candidate): _first_line(error) for kernel in futures[future]}
            progress(done / len(futures))
    return failed


def candidate_names(shape: CallShape) -> list[str]:
    """Return the names of a call's configurations, first BUILT_IN; none if the kernel has only one."""
    others = table.configurations(_problem(shape), target_here(ARCH)).others
    return [BUILT_IN, *others] if others else []


def _problem(shape: CallShape) -> Problem:
    """Return the problem of a call as kernels get it."""
    return filled_problem(shape.planned().checked.problem)


def _begin(environment: dict[str, str]) -> None:
    """Initialise a process of the pool: the server it was forked from may have an older environment."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)


def _compile(kernel: Kernel) -> None:
    """Compile a kernel, in a process of the pool."""
    options = PlanOptions(candidate=kernel.candidate, target=kernel.target)
    launch = _launches(kernel.shape.planned(), options)[kernel.position]
    kernel_cache.find(_key(launch), partial(compiler.artifact_of, launch, ARCH))


def _key(launch: Launch) -> tuple[Any, ...]:
    return (launch.name, launch.arch, launch.key)


def _launches(call: TunedCall, options: PlanOptions) -> tuple[Launch, ...]:
    checked: CheckedCall = replace(call.checked, backend=ARCH)
    return list_launches(checked, call.operands, call.sequence, options)


class _Run(NamedTuple):
    """How calls are measured."""

    timer: Timer
    rounds: int
    failed: Mapping[tuple[CallShape, str], str]  # why a candidate was not compiled
    progress: Callable[[float], None]


def _tuned(shape: CallShape, card: str, run: _Run) -> Tuned:
    """Measure a call and make its row."""
    problem, names = _problem(shape), candidate_names(shape)
    if not names:
        kernel = plan(problem, ARCH).kernel
        return Tuned(shape, None, f"{kernel} has one configuration for this call: nothing was tried")
    medians, refused = measured(shape, names, run)
    row = Row(
        key=table.key_of(problem, ARCH, card), call=str(shape), card=card, candidate=fastest(medians),
        built_in=table.configurations(problem, target_here(ARCH)).built_in, microseconds=medians,
        refused=refused, rounds=run.rounds,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(), kernels=kernel_cache.version(),
        triton=kernel_cache.triton_version(),
    )  # fmt: skip
    return Tuned(shape, row, row.words)


def fastest(medians: Mapping[str, float]) -> str:
    """Return the fastest candidate, if it beats the built-in choice by more than noise, else BUILT_IN."""
    best = min(medians, key=medians.__getitem__)
    return best if medians[BUILT_IN] >= LEAST_GAIN * medians[best] else BUILT_IN


def measured(shape: CallShape, names: Sequence[str], run: _Run) -> tuple[dict[str, float], dict[str, str]]:
    """Return median microseconds of the candidates with right values, and why others were refused."""
    inputs, refused, calls = _inputs(shape, run.timer.device), {}, {}
    want: Tensor | None = None
    for name in names:
        why = run.failed.get((shape, name), "")
        made: list[GraphLaunches] = []
        if not why:
            made, why = _bound(inputs, name)
        if name == BUILT_IN and why:
            raise AttentionError(f"{shape}: the built-in configuration fails: {why}")
        out = inputs[0].operands.out
        want = out.clone() if want is None else want
        why = why or difference(out, want)
        if why:
            refused[name] = why
        else:
            calls[name] = [one.launch for one in made]
    times = run.timer.microseconds(calls, run.rounds, run.progress)
    if not times.get(BUILT_IN):
        raise AttentionError(f"{shape}: the built-in configuration could not be timed")
    refused |= {name: "it could not be timed" for name in calls if name not in times}
    return {name: float(statistics.median(each)) for name, each in times.items()}, refused


def _inputs(shape: CallShape, device: torch.device) -> list[TunedCall]:
    """Draw enough sets of inputs to keep L2 cold, at most `MOST_INPUTS`."""
    first = shape.drawn(device, 0)
    count = max(1, min(MOST_INPUTS, COLD_BYTES // first.bytes))
    drawn = [first, *(shape.drawn(device, seed) for seed in range(1, count))]
    return [call._replace(operands=fitted(call.operands)) for call in drawn]


def _bound(inputs: Sequence[TunedCall], name: str) -> tuple[list[GraphLaunches], str]:
    """Bind a candidate's launches for each set of inputs and run the first; return them, or why that failed."""
    out = inputs[0].operands.out
    try:
        options = PlanOptions(candidate=name)
        made = [GraphLaunches(_launches(call, options), out.get_device()) for call in inputs]
        out.fill_(torch.nan)
        made[0].launch()
        if out.is_cuda:
            torch.cuda.synchronize()
    except (RuntimeError, ValueError) as error:
        return [], _first_line(error)
    return made, ""


def difference(out: Tensor, want: Tensor) -> str:
    """Say what is wrong with a candidate's output; "" if it equals the built-in choice's except for rounding.

    Queries are drawn large, so that a few keys have nearly all the weight: leaving out one tile of keys changes some
    rows altogether, while rounding changes a row by about an ulp.
    """
    ulp = torch.finfo(want.dtype).eps
    error, size = (out.float() - want.float()), want.float()
    rms = error.square().mean().sqrt().item()
    if not rms <= ulp * size.square().mean().sqrt().item():
        return f"its output differs by {rms:.3g} (root mean square)"
    most = error.abs().max().item()
    return "" if most <= 8 * ulp * size.abs().max().item() else f"its output differs by up to {most:.3g}"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]

