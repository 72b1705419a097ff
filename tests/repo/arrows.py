"""Which folder may import which, as one table read from the ground up, and the checks that read it.

    inputs, errors, language, scores, sequences, masks ─► problem ─► kernels ─► runtime ─► serving, api ─► integrations
                                                  └──────► reference ───────────┘                     └──► cli

A row names a folder of warpattn, or a module at its top, and what stands below it that it may import: arrows go down,
never up and never in a circle. A module imports its own folder's modules freely, but no two modules import each other,
not even for types (`if TYPE_CHECKING` counts). ROOT is the package itself (`import warpattn`), which imports nearly
everything and so is only for code that users could have written.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

from tests.repo.rules import parsed

ROOT = "warpattn"

VALUES = {"torch_modes", "inputs", "side_by_side", "errors", "language", "scores", "quantized", "sequences", "masks"}
HOST = VALUES | {"problem"}
PIECES = {"kernels.topology", "kernels.pieces"}
NVIDIA = HOST | PIECES | {"kernels.nvidia"}

ALLOWED: dict[str, set[str]] = {
    "torch_modes": set(),
    "inputs": {"torch_modes"},
    "side_by_side": set(),
    "errors": {"inputs"},
    "machine_code": set(),
    "sim.errors": set(),
    "sim.ir": {"sim.errors"},
    "sim.options": {"sim.errors"},
    "sim.memory": {"sim.errors", "sim.ir"},
    "sim.machine": {"sim.errors", "sim.ir", "sim.memory", "sim.options"},
    "sim.ops": {"sim.errors", "sim.ir", "sim.memory", "sim.machine"},
    "sim.timing": {"sim.errors", "sim.ir", "sim.memory", "sim.machine", "sim.ops", "sim.link"},
    "sim.link": {"sim.errors", "sim.ir", "sim.machine", "sim.ops"},
    "sim": {"sim.errors", "sim.ir", "sim.memory", "sim.machine", "sim.ops", "sim.timing", "sim.link", "sim.options"},
    "sim.host": {"sim", "sim.errors", "sim.memory", "sim.machine"},
    "language": {"inputs", "errors"},
    "scores": {"inputs", "errors", "language"},
    "quantized": {"torch_modes", "inputs", "errors"},
    "sequences": {"torch_modes", "inputs", "errors", "quantized"},
    "masks": {"inputs", "errors", "language", "scores"},
    "reference": VALUES,
    "problem": VALUES,
    "kernels": set(),
    "kernels.topology": set(),
    "kernels.pieces": {"errors", "language", "problem", "kernels.topology"},
    "kernels.nvidia": {"errors", "language", "problem", "sequences", *PIECES},
    "kernels.amd": {"problem", *PIECES},
    "kernels.cache": HOST | PIECES,
    "kernels.merge": HOST | PIECES | {"kernels.cache"},
    "kernels.quantise": HOST | PIECES | {"kernels.cache"},
    "kernels.sm90": NVIDIA,
    "kernels.sm100": NVIDIA,
    "kernels.cdna": HOST | PIECES | {"kernels.amd"},
    "runtime": HOST
    | {"reference", "sim", "kernels.cache", "kernels.merge", "kernels.sm90", "kernels.sm100", "kernels.cdna"},
    "serving": HOST | {"reference", "runtime", "kernels.cache", "kernels.quantise"},
    "api": HOST | {"distributed", "runtime"},
    "distributed": HOST | {"runtime", "serving"},
    "public": HOST | {"api", "reference", "runtime", "serving"},
    ROOT: {"public", "runtime"},
    "integrations": VALUES | {"api", "reference", "serving", ROOT},
    "cli": HOST | {"api", "reference", "runtime", "serving", "sim", "sim.host", "machine_code", "integrations", ROOT},
    "__main__": {"cli", "runtime"},
}
MODULES_AT_TOP = 10
FILES_IN_FOLDER = 16
UNCOUNTED = ("/__init__.py", "/__main__.py")
FOLDERS = (f"{ROOT}/", "bench/", "docs/", "tests/")
RECORDS = "bench/results/"  # a file a measurement, read by name


def import_arrows(path: str, text: str) -> Iterator[str]:
    """One sentence for every import of warpattn in warpattn/`path` that the table does not have."""
    if not path.startswith(f"{ROOT}/"):
        return
    source = folder(module_of(path))
    if source not in ALLOWED:
        yield f"{path} has no line in the import table of tests/repo/arrows.py; give its folder one"
        return
    for line, module in imported(parsed(text), path):
        target = folder(module)
        if target != source and target not in ALLOWED[source]:
            listed = ", ".join(sorted(ALLOWED[source])) or "nothing"
            yield f"{path}:{line} imports {module}; {source} may import {listed}"


def circles(files: dict[str, str]) -> Iterator[str]:
    """One sentence for a circle of imports among modules, given as {path: text}; also one of types alone."""
    names = {module_of(path): path for path in files}
    graph = {}
    for module, path in names.items():
        targets = {target for _, target in imported(ast.parse(files[path]), path, names)}
        # A package's __init__ hands on what its modules define, so an import of it is an import of them.
        graph[module] = targets - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"modules import each other: {' <- '.join(error.args[1])}"


def folder_sizes(paths: Iterable[str]) -> Iterator[str]:
    """One sentence for every folder with too many files, records of measurements, `__init__` and `__main__` not
    counted."""
    counts: dict[str, int] = {}
    for path in paths:
        if path.startswith(FOLDERS) and not path.startswith(RECORDS) and not path.endswith(UNCOUNTED):
            place = path.rpartition("/")[0]
            counts[place] = counts.get(place, 0) + 1
    for place, count in counts.items():
        limit = MODULES_AT_TOP if place == ROOT else FILES_IN_FOLDER
        if count > limit:
            yield f"{place} has {count} files; at most {limit} (make folders of what belongs together)"


def module_of(path: str) -> str:
    """The dotted name of a file."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def folder(module: str) -> str:
    """The line of the table that a dotted module name belongs to: the longest that it begins with."""
    parts = module.split(".")[1:]
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in ALLOWED:
            return ".".join(parts[:end])
    return ".".join(parts) or ROOT


def imported(tree: ast.Module, path: str, modules: Iterable[str] = ()) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import of warpattn, also inside functions and for types.

    `from a import b` is an import of `a.b` if that is one of `modules` or of the table, else of `a`.
    """
    package = module_of(path).split(".")
    if not path.endswith("/__init__.py"):
        package = package[:-1]
    known = {f"{ROOT}.{name}" for name in ALLOWED} | set(modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in dict.fromkeys(names) if name.split(".")[0] == ROOT)
