"""The repository keeps the rules of DESIGN.md: sizes, names, import arrows, README code."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.repo import arrows, rules
from warpattn.runtime.kernel_cache import triton_version

ROOT = Path(__file__).parents[2]
SIZE_LIMIT = 8 * 2**20  # bytes in all tracked files
AT_THE_TOP = {
    *(".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "DESIGN.md", "LICENSE", "Makefile", "README.md"),
    *("mkdocs.yml", "pyproject.toml"),
}
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".svg", ".yml", ".yaml", ".cfg", ".sh", ""}


def files_of(root: Path) -> list[str]:
    """Paths that git tracks or would track, relative to `root`; without git everything outside hidden folders."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False) if (root / ".git").exists() else None
    if listed is None or listed.returncode:
        found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
        return sorted(str(path) for path in found if not {"__pycache__", ".venv", ".git"} & set(path.parts))
    return sorted({name for name in listed.stdout.split("\0") if name and (root / name).is_file()})


def outside_ruff(root: Path) -> set[str]:
    """Python files of the repository that ruff would not look at."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--show-files",
        "--config",
        str(root / "pyproject.toml"),
        str(root),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    seen = {str(Path(line).relative_to(root)) for line in shown.stdout.splitlines()}
    return {path for path in files_of(root) if path.endswith(".py")} - seen


RUN_PAGES = """
import json, sys, traceback
failed = {}
for page, program in json.load(sys.stdin).items():
    try:
        exec(compile(program, page, "exec"), {"__name__": "__main__"})
    except BaseException:
        failed[page] = traceback.format_exc()
print()
print(json.dumps(failed))
"""


def run_markdown(paths: list[Path]) -> dict[str, str]:
    """Run the python blocks of Markdown files, the blocks of each in a namespace of its own, warnings being errors.

    One process runs them all, because most of the time of a page is the import of torch. Errors by file.
    """
    programs = {str(path): "\n".join(rules.python_blocks(path.read_text())) for path in paths}
    command = [sys.executable, "-W", "error", "-c", RUN_PAGES]
    done = subprocess.run(command, input=json.dumps(programs), capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


FILES = files_of(ROOT)
PYTHON = [path for path in FILES if path.endswith(".py")]
COMPILES = re.compile("simulat|gluon|docs.figures", re.IGNORECASE)  # what a page says whose code needs Triton
MARKDOWN = [path for path in FILES if path.endswith(".md") and rules.python_blocks((ROOT / path).read_text())]


def test_python_files():
    """A file meets all checks, then the next one, so that it is parsed once."""
    checks = (rules.file_length, rules.functions, rules.config_fields, rules.module_docstring, arrows.import_arrows)
    texts = ((path, (ROOT / path).read_text()) for path in PYTHON)
    broken = [sentence for path, text in texts for check in checks for sentence in check(path, text)]
    assert not broken, "\n".join(["", *broken])


def test_no_circle_of_imports():
    files = {path: (ROOT / path).read_text() for path in PYTHON if path.startswith("warpattn/")}
    broken = list(arrows.circles(files))
    assert not broken, "\n".join(["", *broken])


def test_folders_are_small():
    broken = list(arrows.folder_sizes(FILES))
    assert not broken, "\n".join(["", *broken])


def test_module_names():
    broken = [sentence for path in PYTHON for sentence in rules.module_name(path)]
    assert not broken, "\n".join(["", *broken])


def test_no_machine_paths():
    text = {path: ROOT / path for path in FILES if Path(path).suffix in TEXT and path != "tests/repo/test_rules.py"}
    broken = [sentence for path, file in text.items() for sentence in rules.machine_paths(path, file.read_text())]
    assert not broken, "\n".join(["", *broken])


def test_words():
    texts = [path for path in FILES if path.endswith(".md") or (path in PYTHON and path.startswith("warpattn/"))]
    broken = [sentence for path in texts for sentence in rules.words(path, (ROOT / path).read_text())]
    assert not broken, "\n".join(["", *broken])


def test_no_test_asserts_a_time():
    tests = [path for path in PYTHON if path.startswith("tests/") and path != "tests/repo/test_rules.py"]
    broken = [sentence for path in tests for sentence in rules.clocks(path, (ROOT / path).read_text())]
    assert not broken, "\n".join(["", *broken])


def test_long_files_are_still_long():
    short = [path for path in rules.LONG_FILES if len((ROOT / path).read_text().splitlines()) <= rules.FILE_LINES]
    assert not short, f"no longer need an exception: {short}"


def test_the_top_folder_holds_what_a_reader_expects():
    """A note or a scratch file committed by mistake is seen."""
    found = {path for path in files_of(ROOT) if "/" not in path and not re.fullmatch(r"requirements[a-z-]*\.txt", path)}
    assert found == AT_THE_TOP


def test_repository_is_small():
    size = sum((ROOT / path).stat().st_size for path in FILES)
    assert size < SIZE_LIMIT, f"{size / 2**20:.1f} MiB"


def test_nothing_hides_from_ruff():
    assert not outside_ruff(ROOT)
    suppressed = [path for path in PYTHON if "ruff: " + "noqa" in (ROOT / path).read_text()]
    assert not suppressed, f"whole files without ruff: {suppressed}"


def test_hiding_from_ruff_is_seen(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.ruff]\nextend-exclude = ["hidden"]\n')
    for name in ("shown", "hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("x = 1\n")
    assert outside_ruff(tmp_path) == {"hidden/a.py"}


def test_markdown_code_runs():
    """Without Triton 3.9, that of pages that need none."""
    compiles = triton_version().startswith("3.9.")
    chosen = [ROOT / path for path in MARKDOWN if compiles or not COMPILES.search((ROOT / path).read_text())]
    failed = run_markdown(chosen)
    assert chosen and not failed, "\n".join(["", *failed.values()])


def test_markdown_code_that_fails_is_seen(tmp_path):
    programs = {"bad": "raise SystemExit('no')", "warned": "import warnings; warnings.warn('no')", "good": "x = 1"}
    for name, program in programs.items():
        (tmp_path / f"{name}.md").write_text(f"```python\n{program}\n```\n")
    failed = run_markdown([tmp_path / f"{name}.md" for name in programs])
    assert sorted(Path(path).stem for path in failed) == ["bad", "warned"]


def test_every_checked_list_has_members():
    assert {"warpattn/machine_code/sass.py", "tests/repo/rules.py"} <= set(PYTHON)
    assert "pyproject.toml" in FILES
