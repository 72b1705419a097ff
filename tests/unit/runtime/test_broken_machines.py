"""Machines that are shared or broken: a call works, says so in one line, and runs nothing that others have written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.drawn import drawn
from warpattn.runtime import cache_folder, kernel_cache
from warpattn.runtime.kernel_cache import Artifact

KERNEL = Artifact(bytes(100_000), "kernel_name", 180_000, 384)
KEY = ("sm90.prefill", 1)
DAY = 86400
ROOT = Path(__file__).parents[3]
STORE = """
import sys
from warpattn.runtime import kernel_cache
from warpattn.runtime.kernel_cache import Artifact
made = Artifact(bytes(range(256)) * 2000, "kernel_name", 180_000, 384)
"""
KEEPS_STORING = (
    STORE
    + """
print("begins", flush=True)
while True:
    for i in range(4):
        kernel_cache.store(kernel_cache.path_of((i,)), made)
"""
)
FULL_DISK = (
    STORE
    + """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
assert kernel_cache.find(("sm90.prefill",), lambda: made) is made
assert kernel_cache.find(("sm90.decode",), lambda: made) is made
"""
)
TWO_PROCESSES = (
    STORE
    + """
import time
def build():
    time.sleep(0.2)
    return made
for i in range(3):
    assert kernel_cache.find((i,), build) == made
"""
)
COMPILES = """
import sys
import torch
import warpattn as wa
from warpattn.__main__ import main
q = torch.randn(1, 64, 1, 64).half()
assert (wa.attention(q, q, q, backend="simulate:gfx950") - wa.attention(q, q, q)).abs().max() < 4e-3
sys.argv[1:] = ["compile", "--shape", "1x64x1x64", "--arch", "gfx950"]
main()
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("WARPATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "_said", set())
    kernel_cache.forget()
    yield tmp_path
    kernel_cache.forget()


def stored(key: tuple = KEY) -> Path:
    path = kernel_cache.path_of(key)
    assert path is not None and kernel_cache.store(path, KERNEL) and kernel_cache.load(path) == KERNEL
    return path


def python(program: str, **environment: str) -> subprocess.Popen:
    """A new process; an empty variable is not there at all."""
    known = {name: value for name, value in (os.environ | environment).items() if value}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=known, **pipes)


def ended(process: subprocess.Popen) -> str:
    """What a process has written on standard error; it must have succeeded."""
    _, said = process.communicate()
    assert process.returncode == 0, said
    return said


def rebuilt(key: tuple = KEY) -> int:
    """How often a kernel is built in a process that has just begun."""
    kernel_cache.forget()
    built = []
    assert kernel_cache.find(key, lambda: built.append(1) or KERNEL) == KERNEL
    return len(built)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_is_not_used(level, mode, place, capsys):
    folder = (place, stored().parent)[level]
    folder.chmod(mode)
    held = sorted(place.rglob("*"))
    assert rebuilt() == 1 and sorted(place.rglob("*")) == held
    if level == 0:
        said = f"warpattn: compiled kernels are kept for this process only: others may write in {place}"
        assert capsys.readouterr().err == f"{said}; chmod go-w changes that\n"


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_compiled_again(mode, place):
    path = stored()
    path.chmod(mode)
    assert rebuilt() == 1 and rebuilt() == 0
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_belongs_to_another_user_is_not_used(place, monkeypatch):
    stored()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert rebuilt() == 1
    assert cache_folder.refusal(place) == f"{place} belongs to another user"


def test_a_file_of_another_user_in_an_own_folder(monkeypatch):
    path, status_of = stored(), os.fstat

    def foreign(handle: int) -> os.stat_result:
        status = list(status_of(handle))
        status[4] += 1  # st_uid
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", foreign)
    assert kernel_cache.load(path) is None


def test_a_right_file_under_the_name_of_another_kernel():
    one, other = stored(), stored(("sm90.decode", 2))
    other.write_bytes(one.read_bytes())
    assert kernel_cache.load(other) is None and rebuilt(("sm90.decode", 2)) == 1


def test_links_are_not_followed(place, tmp_path_factory):
    path, elsewhere = stored(), tmp_path_factory.mktemp("elsewhere")
    path.rename(elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)
    assert rebuilt() == 1 and not path.is_symlink()
    (place / "zz").symlink_to(elsewhere)
    cache_folder.clear(place)
    assert (elsewhere / path.name).exists()


def test_folders_and_files_are_for_this_user_alone(place, monkeypatch):
    monkeypatch.setenv("WARPATTN_CACHE_DIR", str(place / "kernels"))
    before = os.umask(0)
    try:
        path = stored()
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o077 for each in (path, *path.parents[:2])] == [0, 0, 0]


def test_a_file_of_any_size_is_no_burden():
    path = stored()
    with path.open("r+b") as file:
        file.truncate(2**40)
    assert rebuilt() == 1


@pytest.mark.parametrize("in_the_way", ["folder", "pipe", "file above"])
def test_something_else_where_a_kernel_should_be(in_the_way, place):
    path = kernel_cache.path_of(KEY)
    if in_the_way == "file above":
        path.parent.write_text("mine")
    else:
        path.parent.mkdir(mode=0o700)
        path.mkdir() if in_the_way == "folder" else os.mkfifo(path)
    assert rebuilt() == 1
    assert not list(place.rglob("*.part"))


def test_kernels_of_other_versions_leave_early(place, monkeypatch):
    mine = stored()
    with monkeypatch.context() as context:
        context.setattr(kernel_cache, "triton_version", lambda: "3.9.1")
        others = [stored((i,)) for i in range(2)]
    for path, days in ((mine, 30), (others[0], 30), (others[1], 1)):
        then = path.stat().st_mtime - days * DAY
        os.utime(path, (then, then))
    assert rebuilt(("another",)) == 1
    assert [path.exists() for path in (mine, *others)] == [True, False, True]


def test_a_full_disk_is_one_line(place):
    said = ended(python(FULL_DISK))
    assert said == "warpattn: a compiled kernel is kept for this process only: File too large\n"
    assert not [path for path in place.rglob("*") if path.is_file()]


def test_two_processes_that_compile_the_same(place):
    both = [python(TWO_PROCESSES) for _ in range(2)]
    assert [ended(process) for process in both] == ["", ""]
    assert cache_folder.look(place).kernels == 3 and cache_folder.look(place).unfinished == 0


@pytest.mark.parametrize("delay", drawn([0.0, 0.02, 0.05], [0.02]))
def test_a_writer_that_is_killed_at_any_time(delay, place, monkeypatch):
    writer = python(KEEPS_STORING)
    writer.stdout.readline()
    time.sleep(delay)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    for i in range(4):
        path = kernel_cache.path_of((i,))
        assert kernel_cache.load(path) is not None or not path.exists()
    monkeypatch.setattr(cache_folder, "GRACE_S", 0.0)
    cache_folder.sweep(place)
    assert cache_folder.look(place).unfinished == 0


def test_temporary_folders_of_killed_processes_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_folder.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cache_folder.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cache_folder, "GRACE_S", 0.0)
    program = "import sys, time; from warpattn.runtime.cache_folder import private_temporary\n"
    writer = python(f"{program}print(private_temporary(), flush=True); time.sleep(600)", TMPDIR=str(tmp_path))
    left = Path(writer.stdout.readline().strip())
    cache_folder.private_temporary()
    assert left.is_dir()
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    cache_folder.private_temporary()
    assert not left.exists()


@pytest.mark.parametrize("broken", drawn(["home", "damaged"], ["home"]))
def test_where_triton_has_no_folder_a_call_works_and_says_so(broken, place):
    pytest.importorskip("triton")
    (place / "file").write_text("in the way")
    home = {"HOME": str(place / "file"), "XDG_CACHE_HOME": "", "WARPATTN_CACHE_DIR": "", "TRITON_CACHE_DIR": ""}
    if broken == "damaged":
        home |= {"TRITON_CACHE_DIR": str(place / "triton"), "TMPDIR": str(place)}
        assert ended(python(COMPILES, **home)) == ""
        damaged = [path for path in (place / "triton").rglob("*.json") if "__grp__" not in path.name]
        for path in damaged:
            path.write_text("[" * 9)
        assert damaged
    said = ended(python(COMPILES, **home)).splitlines()
    ours = [line for line in said if line.startswith("warpattn: Triton compiles in a temporary folder of this process")]
    assert len(ours) == 1 and (broken == "damaged" or said == ours)  # Triton complains of a kernel that it half made
    assert not list(place.glob("warpattn-*"))
