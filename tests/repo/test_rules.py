"""Each rule complains about a file that breaks it, and only then."""

import graphlib

import pytest

from tests.repo import arrows, rules


def _function(lines: int, decorator: str = "", parameters: int = 0, name: str = "f") -> str:
    arguments = ", ".join(f"p{i}" for i in range(parameters))
    return f"{decorator}\ndef {name}({arguments}):\n" + '    """Doc."""\n' + "    x = 1\n" * (lines - 1)


def _found(check, *arguments) -> str:
    return "\n".join(check(*arguments))


def test_file_length(monkeypatch):
    assert not _found(rules.file_length, "a.py", "x = 1\n" * 400)
    assert "a.py has 401 lines; at most 400" in _found(rules.file_length, "a.py", "x = 1\n" * 401)
    monkeypatch.setitem(rules.LONG_FILES, "a.py", "one table")
    assert not _found(rules.file_length, "a.py", "x = 1\n" * 500)
    assert "at most 500" in _found(rules.file_length, "a.py", "x = 1\n" * 501)


@pytest.mark.parametrize(
    ("decorator", "limit"),
    [("", 60), ("@cache", 60), ("@gluon.jit", 120), ("@triton.jit(do_not_specialize=[1])", 120), ("@jit", 120)],
)
def test_function_length(decorator, limit):
    assert not _found(rules.functions, "warpattn/a.py", _function(limit, decorator))
    assert f"f() has {limit + 1} lines; at most {limit}" in _found(
        rules.functions, "warpattn/a.py", _function(limit + 1, decorator)
    )


def test_methods_and_nested_functions_are_measured():
    nested = "class A:\n    def f(self):\n" + "        def g():\n" + "            x = 1\n" * 60
    found = _found(rules.functions, "warpattn/a.py", nested)
    assert "f() has 62 lines" in found
    assert "g() has 61 lines" in found


@pytest.mark.parametrize(
    ("path", "decorator", "name", "limit"),
    [
        ("warpattn/a.py", "", "f", 8),
        ("warpattn/api/batches.py", "", "attention", 11),
        ("warpattn/api/batches.py", "", "_inner", 8),
        ("warpattn/reference.py", "", "reference", 11),
        ("warpattn/reference.py", "", "tile", 8),
        ("warpattn/kernels/sm90/prefill/kernel.py", "@gluon.jit", "prefill_kernel", 16),
        ("warpattn/kernels/sm90/prefill/kernel.py", "@gluon.jit", "consumer", 8),
        ("warpattn/kernels/sm90/prefill/kernel.py", "", "prefill_kernel", 8),
    ],
)
def test_parameters(path, decorator, name, limit):
    assert not _found(rules.functions, path, _function(3, decorator, limit, name))
    assert f"{limit + 1} parameters; at most {limit}" in _found(
        rules.functions, path, _function(3, decorator, limit + 1, name)
    )


@pytest.mark.parametrize(("name", "fields", "found"), [("AConfig", 12, 0), ("AConfig", 13, 1), ("Problem", 13, 0)])
def test_config_fields(name, fields, found):
    text = f"class {name}:\n" + "    x: int\n" * fields
    assert _found(rules.config_fields, "a.py", text).count("13 fields; at most 12") == found


def test_the_context_of_a_command_is_no_option_of_it():
    text = _function(3, "", 13, "run_command")
    assert not _found(rules.functions, "warpattn/cli/run.py", text.replace("p0", "ctx, p0"))
    assert "14 parameters; at most 13" in _found(rules.functions, "warpattn/cli/run.py", text.replace("p0", "a, p0"))


def test_self_is_not_a_parameter_but_star_arguments_are():
    tree = rules.ast.parse("class A:\n    def f(self, a, /, b, *c, d, **e): ...")
    assert rules.parameters(tree.body[0].body[0]) == ["a", "b", "d", "c", "e"]


def test_module_docstring():
    assert not _found(rules.module_docstring, "a.py", '"""What this module is for, and why."""\n')
    assert "a.py has no module docstring" in _found(rules.module_docstring, "a.py", "x = 1\n")
    assert "a.py has no module docstring" in _found(rules.module_docstring, "a.py", '"""Doc."""\n')


@pytest.mark.parametrize("path", ["warpattn/utils.py", "warpattn/common/a.py", "warpattn/tma_helpers.py"])
def test_names_that_say_nothing(path):
    assert "says nothing about its content" in _found(rules.module_name, path)
    assert not _found(rules.module_name, "warpattn/masks.py")


@pytest.mark.parametrize("folder", ["home", "root", "tmp", "work", "Users"])
def test_machine_paths(folder):
    text = f'first = 1\nCACHE = "/{folder}/someone/cache"\n'
    assert f"a.py:2 names /{folder}/someone" in _found(rules.machine_paths, "a.py", text)


@pytest.mark.parametrize(
    "text", ["https://example.org/home/page", "a ratio of work/tmp/x", "~/tmp/x", "./tmp/y", "$X/tmp/z"]
)
def test_what_is_no_machine_path(text):
    assert not _found(rules.machine_paths, "a.md", text)


@pytest.mark.parametrize(
    "line",
    [
        "start = time.perf_counter()",
        "assert process_time() - start < 3",
        "begin = time.monotonic_ns()",
        "before = os.times()",
        "took = timeit.timeit(f)",
        'program = "import time; print(time.time())"',
        "    assert report.clean and report.seconds < 3",
    ],
)
def test_clocks(line):
    assert "test_a.py:2 reads a clock" in _found(rules.clocks, "test_a.py", f"x = 1\n{line}\n")


@pytest.mark.parametrize("line", ["time = 3", "report.seconds", "wall.times(3)", "assert report.cycles == 7"])
def test_what_is_no_clock(line):
    assert not _found(rules.clocks, "test_a.py", line)


@pytest.mark.parametrize(
    ("sentence", "word"),
    [("Whoever waits is late.", "whoever"), ("the launch in\n    front", "in front"), ("bytes asked for", "asked for"),
     ("a slot that nobody reads", "nobody")],
)
def test_words_that_the_field_has_better_ones_for(sentence, word):
    assert f"a.md:2 says {word!r}; write " in _found(rules.words, "a.md", f"# Title\n{sentence}\n")


@pytest.mark.parametrize("sentence", ["The front end asks for keys.", "infrontal", "the caller waits"])
def test_other_words_are_fine(sentence):
    assert not _found(rules.words, "a.md", sentence)


def test_python_blocks():
    text = "# T\n```python\na = 1\n```\n```bash\nls\n```\n```python\nb = a\n```\n"
    assert rules.python_blocks(text) == ["a = 1\n", "b = a\n"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("warpattn/errors.py", "from warpattn import masks"),
        ("warpattn/masks/library.py", "import warpattn.runtime.plan"),
        ("warpattn/masks/library.py", "import warpattn as wa"),
        ("warpattn/scores.py", "def f():\n    from .masks import Causal"),
        ("warpattn/reference.py", "from warpattn.problem import Problem"),
        ("warpattn/problem/rules.py", "from warpattn.runtime.cuda import check"),
        ("warpattn/runtime/plan.py", "from warpattn.api import attention"),
        ("warpattn/runtime/plan.py", "from warpattn import serving"),
        ("warpattn/kernels/sm90/prefill/kernel.py", "from warpattn.kernels.sm100 import layouts"),
        ("warpattn/kernels/sm90/prefill/kernel.py", "from warpattn.kernels import sm100"),
        ("warpattn/kernels/sm90/prefill/launch.py", "from warpattn.runtime import cuda"),
        ("warpattn/kernels/nvidia/tma.py", "from ..sm90.layouts import q_layout"),
        ("warpattn/kernels/pieces/span.py", "from warpattn.kernels.nvidia import tma"),
        ("warpattn/kernels/sm90/prefill/kernel.py", "import warpattn.sim.ir"),
        ("warpattn/sim/ops/core.py", "from ...kernels.sm90 import prefill"),
        ("warpattn/sim/ops/core.py", "from ..timing import cost"),
        ("warpattn/sim/memory/shared.py", "from ..machine.agents import Agent"),
        ("warpattn/api/dense.py", "from warpattn.cli import demo"),
        ("warpattn/errors.py", "if TYPE_CHECKING:\n    from warpattn.masks import Mask"),
        ("warpattn/brand_new.py", ""),
    ],
)
def test_forbidden_arrows(path, text):
    assert path in _found(arrows.import_arrows, path, text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("warpattn/masks/library.py", "from .base import Mask\nimport torch\nfrom warpattn.language import expr"),
        ("warpattn/api/dense.py", "from warpattn.runtime import route\nfrom warpattn.masks import Mask"),
        ("warpattn/runtime/plan.py", "from warpattn.kernels.sm90.prefill.config import Config"),
        ("warpattn/runtime/execute.py", "from warpattn.kernels import sm90\nfrom .plan import Plan"),
        (
            "warpattn/kernels/sm90/prefill/kernel.py",
            "from .layouts import a\nfrom ...nvidia import tma\nfrom warpattn.kernels.pieces import span",
        ),
        ("warpattn/cli/demo.py", "import warpattn as wa\nfrom warpattn.runtime.plan import plan"),
        ("warpattn/public.py", "from .api import attention\nfrom .masks import Causal"),
        ("bench/run.py", "import warpattn.cli"),
    ],
)
def test_allowed_arrows(path, text):
    assert not _found(arrows.import_arrows, path, text)


def test_the_table_itself_never_turns_round():
    assert set().union(*arrows.ALLOWED.values()) <= set(arrows.ALLOWED)
    graphlib.TopologicalSorter(arrows.ALLOWED).prepare()  # raises CycleError


@pytest.mark.parametrize("text", ["from .b import B", "if TYPE_CHECKING:\n    from warpattn.x.b import B"])
def test_circles_are_seen(text):
    files = {"warpattn/x/a.py": text, "warpattn/x/b.py": "def f():\n    from . import a"}
    assert "warpattn.x.a" in _found(arrows.circles, files)
    assert not _found(arrows.circles, files | {"warpattn/x/b.py": ""})


@pytest.mark.parametrize(
    ("place", "limit"), [("warpattn", 10), ("warpattn/sim/ops", 16), ("bench", 16), ("docs", 16), ("tests/sim", 16)]
)
def test_folder_sizes(place, limit):
    paths = [f"{place}/m{i}.py" for i in range(limit)] + [f"{place}/__init__.py", "bench/results/h200/a.json"]
    assert not _found(arrows.folder_sizes, paths)
    assert f"{place} has {limit + 1} files; at most {limit}" in _found(arrows.folder_sizes, [*paths, f"{place}/n.py"])
