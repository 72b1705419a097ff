"""Checks on the source text: each takes a path and its text and yields one sentence per broken rule.

They are functions without state so that test_rules.py can show each of them a bad file it must complain about.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import PurePosixPath

FILE_LINES = 400
FILE_LINES_HARD = 500
CONFIG_FIELDS = 12
HOST_LINES = 60
DEVICE_LINES = 120
PARAMETERS = 8
API_PARAMETERS = 11  # three tensors, one sequence and the keyword tail of seven
KERNEL_PARAMETERS = 16
COMMAND_PARAMETERS = 13  # options and arguments of a command, each with its own help

# Files between the soft and the hard limit, each with the reason why it is not two files.
LONG_FILES: dict[str, str] = {}
# Where the public signatures stand; the names that count as API there (None: every public one).
API: dict[str, set[str] | None] = {
    "warpattn/api/dense.py": {"attention"},
    "warpattn/api/batches.py": None,
    "warpattn/api/backward.py": None,
    "warpattn/serving/append.py": {"append_paged"},
    "warpattn/serving/slots.py": {"append_slots"},
    "warpattn/reference.py": {"reference"},
    "warpattn/distributed/context.py": {"ring_attention", "ulysses_attention", "mesh_attention"},
    "warpattn/distributed/paged.py": {"paged_attention"},
    "warpattn/serving/plans.py": {"__init__"},
    "warpattn/cli/run.py": {"run"},
    "warpattn/cli/bench.py": {"bench"},
    "warpattn/serving/step_plan.py": {"__init__"},
}

BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "tools"}
# A machine's own folders; "/path/in/prose" and URLs stay possible.
_MACHINE_PATH = re.compile(r"(?<![\w.:/~$}>-])/(?:home|root|work|tmp|mnt|Users|opt|data|scratch)/[\w.-]+")
# A clock, or an assertion about the seconds that something says it took.
_CLOCK = re.compile(
    r"\b(?:perf_counter|process_time|thread_time|monotonic|time\.time)(?:_ns)?\(|\bos\.times\(|\btimeit\b|\bgetrusage\(.*_utime"
    r"|^\s*assert\b.*\.(?:seconds|elapsed)\b"
)

# Words for what the field has a noun or a verb for, and what to write.
WORDS = {
    "whoever": "say who: the warp, the caller",
    "whomever": "say who: the warp, the caller",
    "nobody": "say who: no role, no row, no process",
    "somebody": "say who: another launch, a user",
    "everybody": "say who: all roles, every user",
    "in front": "the preceding kernel, launch or tile",
    "asked for": "requested, prefetched, loaded",
    "comes early": "programmatic dependent launch (PDL)",
}
_WORDS = re.compile(rf"\b(?:{'|'.join(WORDS)})\b".replace(" ", r"\s+"), re.IGNORECASE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def file_length(path: str, text: str) -> Iterator[str]:
    """A file has at most 400 lines; up to 500 with a reason in LONG_FILES."""
    lines = len(text.splitlines())
    limit = FILE_LINES_HARD if path in LONG_FILES else FILE_LINES
    if lines > limit:
        yield f"{path} has {lines} lines; at most {limit} (split it by what its parts are about)"


@lru_cache(1)
def parsed(text: str) -> ast.Module:
    """The tree of the file that is checked; several checks in turn need it."""
    return ast.parse(text)


def functions(path: str, text: str) -> Iterator[str]:
    """Every function keeps to its number of lines (docstring not counted) and of parameters (self not counted)."""
    for function in (node for node in ast.walk(parsed(text)) if isinstance(node, Function)):
        device = is_device(function)
        lines = code_lines(function)
        limit = DEVICE_LINES if device else HOST_LINES
        where = f"{path}:{function.lineno} {function.name}()"
        if lines > limit:
            yield f"{where} has {lines} lines; at most {limit} for a {'device' if device else 'host'} function"
        count = len(parameters(function))
        allowed = _parameters_allowed(path, function)
        if count > allowed:
            yield f"{where} has {count} parameters; at most {allowed} (put what belongs together into one value)"


def config_fields(path: str, text: str) -> Iterator[str]:
    """A configuration has at most 12 fields of its own; those that belong together are one value."""
    for node in (node for node in ast.walk(parsed(text)) if isinstance(node, ast.ClassDef)):
        count = sum(isinstance(statement, ast.AnnAssign) for statement in node.body)
        if node.name.endswith("Config") and count > CONFIG_FIELDS:
            yield f"{path}:{node.lineno} {node.name} has {count} fields; at most {CONFIG_FIELDS}"


def module_docstring(path: str, text: str) -> Iterator[str]:
    """Every module says what it is and why."""
    if len(ast.get_docstring(parsed(text)) or "") < 20:
        yield f"{path} has no module docstring saying what it is for"


def module_name(path: str) -> Iterator[str]:
    """No drawers for things that have no place: a module is named after what it holds."""
    for part in PurePosixPath(path).with_suffix("").parts:
        if part in BANNED_NAMES or part.split("_")[-1] in BANNED_NAMES:
            yield f"{path}: {part!r} says nothing about its content; name the module after what it holds"


def machine_paths(path: str, text: str) -> Iterator[str]:
    """Nothing refers to a folder of one machine."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in _MACHINE_PATH.findall(line):
            yield f"{path}:{number} names {found}, a folder of one machine"


def clocks(path: str, text: str) -> Iterator[str]:
    """No test depends on how fast or how busy a machine is; `bench` measures and reports."""
    for number, line in enumerate(text.splitlines(), 1):
        if _CLOCK.search(line):
            yield f"{path}:{number} reads a clock; a test asserts no time (count what happens, or measure it in bench)"


def words(path: str, text: str) -> Iterator[str]:
    """Texts use the field's words; a line may end within one that is not."""
    for found in _WORDS.finditer(text):
        number, word = text.count("\n", 0, found.start()) + 1, " ".join(found.group().lower().split())
        yield f"{path}:{number} says {word!r}; write {WORDS[word]}"


def python_blocks(text: str) -> list[str]:
    """The ```python blocks of a Markdown text, in order."""
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def is_device(function: Function) -> bool:
    """Whether a decorator compiles the function for the device: @gluon.jit, @triton.jit, @jit, @gluon.jit(...)."""
    return any(_last_name(decorator) in {"jit", "constexpr_function"} for decorator in function.decorator_list)


def code_lines(function: Function) -> int:
    """Lines from `def` to the end of the body, without the docstring's."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function):
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def parameters(function: Function) -> list[str]:
    """Names of the parameters, *args and **kwargs counted, self and cls not."""
    spec = function.args
    listed = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    return [a.arg for i, a in enumerate(listed) if not (i == 0 and a.arg in {"self", "cls"})]


def _parameters_allowed(path: str, function: Function) -> int:
    public = not function.name.startswith("_") or function.name == "__init__"
    if path in API and public and (API[path] is None or function.name in API[path]):
        return API_PARAMETERS
    if path.startswith("warpattn/cli/") and function.name.endswith("_command"):
        return COMMAND_PARAMETERS + ("ctx" in parameters(function))  # typer's context is no option
    # An entry kernel is what the host launches: its descriptors and sizes cannot arrive packed into one value.
    entry = is_device(function) and path.startswith("warpattn/kernels/") and function.name.endswith("_kernel")
    return KERNEL_PARAMETERS if entry else PARAMETERS


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
