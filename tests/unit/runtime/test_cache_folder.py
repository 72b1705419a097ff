"""The folder of compiled kernels: its limit, who leaves first, and what is never touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from warpattn.errors import AttentionError
from warpattn.runtime import cache_folder, kernel_cache
from warpattn.runtime.kernel_cache import Artifact

KERNEL = Artifact(bytes(100_000), "kernel_name", 180_000, 384)
DAY = 86400
WRITER = """
import os, sys, tempfile, time
from warpattn.runtime.cache_folder import lock
handle, path = tempfile.mkstemp(dir=sys.argv[1], suffix=".part")
lock(handle)
os.write(handle, b"half a ker")
os.utime(path, (1, 1))
print(path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("WARPATTN_CACHE_DIR", str(tmp_path))
    kernel_cache.forget()
    yield tmp_path
    kernel_cache.forget()


def kernel(name: str, age: float, size: int = 1000) -> Path:
    """A file of a kernel that was last used `age` seconds ago."""
    path = cache_folder.folder() / name[:2] / f"{name[2:]}.kernel"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(size))
    return aged(path, age)


def aged(path: Path, age: float) -> Path:
    """A file that was just written, as if last used `age` seconds ago."""
    then = path.stat().st_mtime - age
    os.utime(path, (then, then))
    return path


def left() -> set[str]:
    return {path.parent.name + path.stem for path in cache_folder.folder().rglob("*.kernel")}


def test_those_used_longest_ago_leave_first(place):
    for i, name in enumerate(("aa1", "ab2", "ac3", "ad4")):
        kernel(name, age=100 * (i + 1))
    assert cache_folder.sweep(place, 2500) == 2
    assert left() == {"aa1", "ab2"}
    assert cache_folder.sweep(place, 2500) == 0


def test_a_kernel_that_is_taken_from_the_disk_stays(place):
    first, second = (kernel_cache.path_of((name,)) for name in ("first", "second"))
    for path, age in ((first, 300), (second, 200)):
        kernel_cache.store(path, KERNEL)
        aged(path, age)
    assert kernel_cache.load(first) == KERNEL
    cache_folder.sweep(place, 150_000)
    assert first.exists() and not second.exists()


def test_the_limit_holds_when_kernels_are_stored(place, monkeypatch):
    monkeypatch.setenv("WARPATTN_CACHE_MIB", "1")
    for i in range(14):
        kernel_cache.find((i,), lambda: KERNEL)
        aged(kernel_cache.path_of((i,)), 1000 - i)
    held = cache_folder.look(place)
    assert held.kernels == 10 and held.size <= 2**20
    assert kernel_cache.path_of((13,)).exists() and not kernel_cache.path_of((0,)).exists()


def test_kernels_of_versions_that_nobody_has_any_more_leave(place):
    kernel("aa1", age=(cache_folder.UNUSED_DAYS + 1) * DAY)
    kernel("ab2", age=(cache_folder.UNUSED_DAYS - 1) * DAY)
    cache_folder.sweep(place)
    assert left() == {"ab2"}


def test_what_a_process_is_writing_stays_until_it_is_killed(place):
    (place / "aa").mkdir()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, place / "aa"], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        part = Path(writer.stdout.readline().strip())
        kernel("ab2", age=5)
        assert cache_folder.clear(place) == 1
        assert part.read_bytes() == b"half a ker"
        assert cache_folder.look(place).unfinished == 1
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    assert cache_folder.clear(place) == 0
    assert not list(place.rglob("*"))


def test_a_new_file_without_its_lock_yet_stays(place):
    path = kernel("aa1", age=0).with_suffix(".part")
    path.write_bytes(b"")
    cache_folder.clear(place)
    assert path.exists()


def test_other_files_stay(place):
    path = place / "aa" / "notes.txt"
    path.parent.mkdir()
    path.write_text("mine")
    (place / "note.kernel").write_text("mine, too")
    cache_folder.clear(place)
    assert path.exists() and (place / "note.kernel").exists()


@pytest.mark.parametrize("value", ["-1", "much", "1.5"])
def test_a_limit_that_is_no_number(value, monkeypatch):
    monkeypatch.setenv("WARPATTN_CACHE_MIB", value)
    with pytest.raises(AttentionError, match=f"WARPATTN_CACHE_MIB is '{value}'; it must be a whole number of MiB"):
        cache_folder.limit()


def test_a_folder_that_is_not_there(place):
    for missing in (None, place / "no", place / ("n" * 300)):  # the system says nothing about names that long
        assert cache_folder.look(missing) == cache_folder.Contents()
        assert cache_folder.sweep(missing) == cache_folder.clear(missing) == 0


def test_files_that_no_reader_can_bear(place):
    path = kernel("aa1", age=0)
    path.write_bytes(b"[" * 200_000 + b"\n")
    assert kernel_cache.load(path) is None
    path.unlink()
    os.mkfifo(path)
    assert kernel_cache.load(path) is None  # and does not wait for a writer
    path.unlink()
    path.mkdir()
    assert kernel_cache.load(path) is None


class Terminal:
    """Standard error as a terminal, or not."""

    def __init__(self, is_one: bool) -> None:
        self.is_one, self.text = is_one, ""

    def isatty(self) -> bool:
        return self.is_one

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_the_first_use_is_one_line_on_a_terminal(place, monkeypatch):
    terminal = Terminal(True)
    monkeypatch.setattr(kernel_cache.sys, "stderr", terminal)
    for _ in range(2):
        kernel_cache.find(("sm90.prefill", 1), lambda: KERNEL)
    assert terminal.text == f"warpattn: compiling sm90.prefill, once: it is kept in {place}\n"


@pytest.mark.parametrize(("is_one", "wanted"), [(False, "1"), (True, "0")])
def test_no_line_elsewhere_or_if_it_is_not_wanted(is_one, wanted, monkeypatch):
    terminal = Terminal(is_one)
    monkeypatch.setattr(kernel_cache.sys, "stderr", terminal)
    monkeypatch.setenv("WARPATTN_PROGRESS", wanted)
    kernel_cache.find(("sm90.prefill", 1), lambda: KERNEL)
    assert terminal.text == ""
