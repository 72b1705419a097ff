"""Kernels on disk: written at once, read back whole or not at all, named by everything that decides them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from warpattn.runtime import kernel_cache
from warpattn.runtime.kernel_cache import Artifact

KERNEL = Artifact(bytes(range(256)) * 40 + b"\n\n", "kernel_name", 180_000, 384)
KEY = ("config", ("code", 3), None, True)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WARPATTN_CACHE_DIR", str(tmp_path))
    kernel_cache.forget()
    yield
    kernel_cache.forget()


class Compiler:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Artifact:
        self.calls += 1
        return KERNEL


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_compiled_once_then_from_memory_then_from_disk(tmp_path):
    compiler = Compiler()
    assert [kernel_cache.find(KEY, compiler) for _ in range(3)] == [KERNEL] * 3
    kernel_cache.forget()
    assert kernel_cache.find(KEY, compiler) == KERNEL
    assert compiler.calls == 1
    assert len(files(tmp_path)) == 1, "no temporary file is left"


def test_another_key_is_another_kernel():
    compiler = Compiler()
    for key in (KEY, (*KEY, 1), ("config", ("code", 4), None, True)):
        kernel_cache.find(key, compiler)
    assert compiler.calls == 3


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "header", "not ours", "entry", "older format"])
def test_damaged_files_are_compiled_again(damage, tmp_path):
    compiler = Compiler()
    kernel_cache.find(KEY, compiler)
    path = files(tmp_path)[0]
    whole = path.read_bytes()
    broken = {
        "empty": b"",
        "truncated": whole[:-1],
        "flipped": whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:],
        "header": whole[10:],
        "not ours": b'{"some": "json"}\n' + KERNEL.cubin,
        "entry": whole.replace(b"kernel_name", b"kernel_nam3", 1),
        "older format": whole.replace(kernel_cache.FORMAT.encode(), b"warpattn kernel 0", 1),
    }[damage]
    assert broken != whole
    path.write_bytes(broken)
    kernel_cache.forget()
    assert kernel_cache.find(KEY, compiler) == KERNEL
    assert compiler.calls == 2
    assert path.read_bytes() == whole, "the file is whole again"


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("WARPATTN_CACHE_DIR", str(blocked / "below"))
    compiler = Compiler()
    assert kernel_cache.find(KEY, compiler) == kernel_cache.find(KEY, compiler) == KERNEL
    assert compiler.calls == 1
    assert not kernel_cache.store(kernel_cache.path_of(KEY), KERNEL)


def test_a_full_disk(monkeypatch, tmp_path):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert kernel_cache.find(KEY, Compiler()) == KERNEL
    assert files(tmp_path) == []


def test_where_kernels_are_kept(monkeypatch):
    monkeypatch.delenv("WARPATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.join(os.sep, "x"))  # noqa: PTH118
    assert kernel_cache.folder() == Path(os.sep, "x", "warpattn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", os.path.join(os.sep, "y"))  # noqa: PTH118
    assert kernel_cache.folder() == Path(os.sep, "y", ".cache", "warpattn")


def test_sources_and_triton_decide_the_name(monkeypatch):
    names = {kernel_cache.path_of(KEY)}
    with monkeypatch.context() as context:
        context.setattr(kernel_cache, "triton_version", lambda: "3.9.1")
        names.add(kernel_cache.path_of(KEY))
    with monkeypatch.context() as context:
        context.setattr(kernel_cache, "_sources", lambda: "other text")
        names.add(kernel_cache.path_of(KEY))
    assert len(names) == 3


@pytest.mark.parametrize("name", ["TRITON_OVERRIDE_ARCH", "DISABLE_LLVM_OPT", "PTXAS_OPTIONS"])
def test_settings_of_the_compiler_decide_the_name(monkeypatch, name):
    """Code made for another chip, or not optimised, is no other run's; nor is it an old version's."""
    usual, version = kernel_cache.path_of(KEY), kernel_cache.version()
    monkeypatch.setenv(name, "1")
    assert kernel_cache.path_of(KEY) != usual and kernel_cache.version() == version
    monkeypatch.setenv("TRITON_DUMP_DIR", "elsewhere")
    monkeypatch.delenv(name)
    assert kernel_cache.path_of(KEY) == usual


def test_settings_are_those_by_which_triton_tells_kernels_apart():
    triton = pytest.importorskip("triton")
    (library,) = (Path(triton.__file__).parent / "_C").glob("libtriton*.so")
    form = rb"\b(?:TRITON|LLVM|DISABLE|MLIR|NVPTX|AMDGCN|ALLOW|PTXAS)_[A-Z0-9_]{3,}\b"
    every = {name.decode() for name in re.findall(form, library.read_bytes())}
    code = "from triton._C.libtriton import get_cache_invalidating_env_vars as names; print(*names())"
    given = os.environ | {name: "1" for name in every if "PLUGIN" not in name}
    told = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True).stdout
    watching = re.compile("DUMP|TIMING|DEBUG|DIAGNOSTICS|LINE_INFO|LOCAL_VARIABLES|MULTITHREADING|CONSAN")
    found = {name for name in told.split() if not watching.search(name)}
    assert len(found) > 10 and found <= set(kernel_cache.SETTINGS)


def test_what_kernels_import_is_among_the_sources():
    """Else a new version would take a kernel that an old one compiled otherwise: CDNA's conditions of masks are made by
    language/ranges.py."""
    package, known = kernel_cache.PACKAGE, set(kernel_cache.source_files())
    for path in package.joinpath("kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.module if isinstance(node, ast.ImportFrom) and node.level == 0 else None
            if name and name.startswith("warpattn.") and name != "warpattn.errors":  # whose words are in no kernel
                found = package.joinpath(*name.split(".")[1:])
                assert (found / "__init__.py" if found.is_dir() else found.with_suffix(".py")) in known, (path, name)


@pytest.mark.parametrize("changed", ["kernels/sm90/a.py", "language/b.py", "quantized.py"])
def test_the_text_of_every_source_decides(changed, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_cache, "PACKAGE", tmp_path)
    for name in ("kernels/sm90/a.py", "language/b.py", *kernel_cache.SOURCES[2:]):
        path = tmp_path / name if name.endswith(".py") else tmp_path / name / "c.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    before = kernel_cache._sources.__wrapped__()
    (tmp_path / changed).write_text("x = 2\n")
    after = kernel_cache._sources.__wrapped__()
    (tmp_path / changed).rename((tmp_path / changed).with_name("d.py"))
    assert len({before, after, kernel_cache._sources.__wrapped__()}) == 3


def test_the_version_of_triton_is_read_without_importing_it():
    triton = pytest.importorskip("triton")
    assert kernel_cache._installed_triton() == triton.__version__ == kernel_cache.triton_version()


def test_threads_compile_once():
    compiler, found = Compiler(), []
    threads = [threading.Thread(target=lambda: found.append(kernel_cache.find(KEY, compiler))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [KERNEL] * 8 and compiler.calls == 1


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(kernel_cache, "IN_MEMORY", 4)
    for i in range(20):
        kernel_cache.find((i,), Compiler())
        assert len(kernel_cache._memory) <= 5
