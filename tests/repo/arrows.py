"""Who may import whom, as one table, and the check that reads it.

    api -> {masks, scores, sequences, problem, check} -> plan -> kernels/<arch> -> kernels/{nvidia|amd}
      -> kernels/pieces

An arrow may skip steps, never turn round. A name stands for the module or for everything below the package. `<arch>` is
any folder of kernels/ that is not named in the table; two of them never import each other. ROOT is the package itself
(`import warpattn`), which imports nearly everything and so is only for code that users could have written. Imports
under `if TYPE_CHECKING` name a type and are no arrow.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

ROOT = "warpattn"
ANYTHING = {"*"}

LANGUAGE = {"check", "evaluate", "expr", "nodes", "number"}
MASKS = {"algebra", "documents", "picture", "masks"}
VALUES = LANGUAGE | MASKS | {"traced", "scores", "sequences"}
HOST = VALUES | {"backends", "problem", "target"}
DEVICE = {"kernels.pieces", "kernels.topology"}
RUNTIME = {"abi", "artifacts", "counters", "cuda"}

ALLOWED: dict[str, set[str]] = {
    "check": set(),
    "number": set(),
    "nodes": {"number"},
    "evaluate": {"nodes", "number"},
    "expr": {"check", "evaluate", "nodes", "number"},
    "sass": set(),
    "gcn": set(),
    "hip": {"abi", "artifacts", "cuda", "step"},
    "cuda": set(),
    "abi": set(),
    "artifacts": {"abi", "check"},
    "counters": set(),
    "backends": set(),
    "target": {"check"},
    "traced": LANGUAGE,
    "scores": LANGUAGE | {"traced"},
    "picture": LANGUAGE | {"traced"},
    "documents": LANGUAGE | {"traced"},
    "algebra": LANGUAGE | {"traced", "scores", "picture"},
    "masks": LANGUAGE | {"traced", "scores", "algebra", "documents", "picture"},
    "sequences": {"check"},
    "reference": VALUES,
    "problem": VALUES | {"backends"},
    "kernels.topology": set(),
    "kernels.pieces": {"kernels.topology", "check", "nodes"},
    "kernels.nvidia": DEVICE | {"check", "step"},
    "kernels.amd": DEVICE,
    "kernels.cache": HOST | DEVICE | {"step"},
    "kernels.<arch>": HOST | DEVICE | {"kernels.nvidia", "kernels.amd", "operands", "step", "cuda"},
    "step": set(),
    "operands": HOST,
    "plan": HOST | {"step", "operands", "kernels.topology", "kernels.<arch>"},
    "dispatch": HOST | RUNTIME | {"hip", "plan", "step", "operands"},
    "append": HOST | {"cuda", "dispatch", "operands", "repeat", "kernels.cache"},
    "launch": HOST | DEVICE | RUNTIME | {"dispatch", "plan", "step", "operands", "kernels.<arch>"},
    "repeat": HOST | {"abi", "cuda", "dispatch", "hip", "operands", "step"},
    "serving": HOST | {"cuda", "operands", "plan", "reference", "repeat", "step", "kernels.<arch>"},
    "planned": HOST | {"cuda", "launch", "operands", "plan", "repeat", "kernels.<arch>"},
    "simulated": HOST | {"artifacts", "operands", "plan", "step", "sim"},
    "route": HOST | {"operands", "reference", "dispatch", "launch", "planned", "simulated"},
    "ops": HOST | {"planned", "route"},
    "api": HOST | {"reference", "plan", "route", "ops"},
    "sim": {"target", "check"},
    "integrations": VALUES | {"api", "append", ROOT},
    "cli": ANYTHING,
    "__main__": {"cli"},
    ROOT: HOST | {"api", "append", "reference", "plan", "serving"},
}


def import_arrows(path: str, text: str) -> Iterator[str]:
    """One sentence for every import of warpattn in warpattn/`path` that the table does not have."""
    if not path.startswith(f"{ROOT}/"):
        return
    source = group(path.removesuffix(".py").replace("/", "."))
    if source not in ALLOWED:
        yield f"{path} has no line in the import table of tests/repo/arrows.py; give it one"
        return
    allowed = ALLOWED[source]
    package = path.removesuffix("/__init__.py").removesuffix(".py").split("/")
    if not path.endswith("/__init__.py"):
        package = package[:-1]
    for line, module in imported(ast.parse(text), package):
        target = group(module)
        same = target == source and (source != "kernels.<arch>" or _folder(module) == _folder(".".join(package)))
        if not (same or allowed == ANYTHING or target in allowed):
            yield f"{path}:{line} imports {module}; {source} may import {', '.join(sorted(allowed)) or 'nothing'}"


def group(module: str) -> str:
    """The line of the table that a dotted module name belongs to."""
    parts = module.split(".")[1:]
    if not parts or parts == ["__init__"]:
        return ROOT
    if parts[0] == "kernels" and len(parts) > 1 and parts[1] != "__init__":
        name = f"kernels.{parts[1]}"
        return name if name in ALLOWED else "kernels.<arch>"
    return parts[0] if parts[0] != "kernels" else "kernels.topology"


def imported(tree: ast.Module, package: list[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import of warpattn, also inside functions; `from warpattn import x` names x."""
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            # `from warpattn import masks` is an arrow to masks; `from warpattn.masks import Causal` one to masks, too.
            plain = base in {ROOT, f"{ROOT}.kernels"}
            names = [f"{base}.{alias.name}" if plain and _is_module(alias.name) else base for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in dict.fromkeys(names) if name.split(".")[0] == ROOT)


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node`, except what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            for other in child.orelse:
                yield other
                yield from _executed(other)
        else:
            yield child
            yield from _executed(child)


def _is_module(name: str) -> bool:
    """`from warpattn import name`: a module of the table, rather than something the package exports."""
    return name in ALLOWED or any(f"kernels.{name}" == line for line in ALLOWED) or name.startswith(("sm", "cdna"))


def _folder(module: str) -> str:
    return ".".join(module.split(".")[:3])
