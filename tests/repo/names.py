"""Which files, folders, modules and names in code a text has, and which of them do not exist.

    `warpattn/problem/rules.py`  `pieces/span.py`  `kernels/nvidia`  `prefill/{load,attend}.py`  `<arch>/layouts.py`
    `warpattn.sim`  `warpattn.machine_code.gcn`  `warpattn.sim.knock_out`

A path may leave out its beginning, as long as it is the end of some file's or folder's path. A name in code is what
stands in backticks with an underscore or with two capital letters in it: it has to occur in some source.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from itertools import product
from pathlib import Path, PurePosixPath

_FILE = re.compile(r"(?<![\w/.:<>-])(?:\.\./)*([\w./{},*<>-]*[\w}*]\.py)\b(?!\.)")
_QUOTED = re.compile(r"`([\w.{},*<>-]+/[\w./{},*<>-]*)`")
_ANY = re.compile(r"<\w+>")
_MODULE = re.compile(r"(?<![\w/@.])warpattn((?:\.[A-Za-z_]\w*)+)")
_NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")
_OF_CODE = re.compile(r"\w+_\w*|[A-Z]+[a-z]+[A-Z]\w*")
_OURS = re.compile(r"\bwa((?:\.[A-Za-z_]\w*)+)")
_BLOCK = re.compile(r"^```(?:py|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_IMPORT = re.compile(r"^(?:from|import) \w", re.MULTILINE)
_BRACES = re.compile(r"\{([^{}]*)\}")


def missing(text: str, files: Iterable[str], root: Path) -> Iterator[str]:
    """One sentence for every name in `text` that fits none of `files`, the paths of the repository below `root`."""
    known = set(files)
    folders = {str(parent) for name in known for parent in PurePosixPath(name).parents} - {"."}
    first = {PurePosixPath(folder).name for folder in folders}
    for found in dict.fromkeys(_FILE.findall(text)):
        yield from (f"{name} is no file" for name in spelled_out(found) if not _ends(name, known))
    for found in dict.fromkeys(_QUOTED.findall(text)):
        if found.partition("/")[0] in first and not found.endswith(".py"):
            every = known | folders
            yield from (f"{name} is no path" for name in spelled_out(found.rstrip("/")) if not _ends(name, every))
    for found in dict.fromkeys(_MODULE.findall(text)):
        if not _defined(found.strip(".").split("."), known, root):
            yield f"warpattn{found} is no module, and no name in one"


def words_of(source: str) -> set[str]:
    """What a name in code may be."""
    return set(re.findall(r"\w+", source))


def unknown(text: str, words: set[str]) -> Iterator[str]:
    """One sentence for every name in code that is none of `words`."""
    for found in dict.fromkeys(_NAME.findall(text)):
        parts = [part for part in found.split(".") if _OF_CODE.fullmatch(part)]
        yield from (f"{found}: no source has {part}" for part in parts if part not in words)


def absent(text: str) -> Iterator[str]:
    """One sentence for every `wa.name` that warpattn has not, and every name that a listing takes from it in vain.

    Listings are blocks of code that no test runs: those of `python` are run by themselves.
    """
    for found in dict.fromkeys(_OURS.findall(text)):
        if not _has("warpattn", found.strip(".").split(".")):
            yield f"wa{found}: warpattn has none"
    for block in filter(_IMPORT.search, _BLOCK.findall(text)):
        try:
            tree = ast.parse(block)
        except SyntaxError as error:
            yield f"a listing does not compile: {error}"
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "warpattn":
                names = [alias.name for alias in node.names]
                yield from (f"{node.module} has no {name}" for name in names if not _has(node.module, [name]))


def _has(module: str, names: list[str]) -> bool:
    """Whether names one below the other are in a module."""
    found = importlib.import_module(module)
    for name in names:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def spelled_out(name: str) -> list[str]:
    """`a/{b,c}.py` as `a/b.py` and `a/c.py`; `<arch>` as `*`."""
    parts = _BRACES.split(_ANY.sub("*", name))
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def _ends(name: str, known: set[str]) -> bool:
    """Whether a path is `name` or ends in it; `*` stands for anything."""
    return name in known or any(fnmatch(path, f"*/{name}") or fnmatch(path, name) for path in known)


def _defined(parts: list[str], known: set[str], root: Path) -> bool:
    """Whether `warpattn.a.b` is a module, or a name in the text of `warpattn.a`."""
    module, rest = "warpattn", list(parts)
    while rest and ({f"{module}/{rest[0]}.py", f"{module}/{rest[0]}/__init__.py"} & known):
        module = f"{module}/{rest.pop(0)}"
    if len(rest) > 1:
        return False
    file = root / (f"{module}.py" if f"{module}.py" in known else f"{module}/__init__.py")
    return not rest or re.search(rf"\b{rest[0]}\b", file.read_text()) is not None
