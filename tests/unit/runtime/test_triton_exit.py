"""How a process that compiled kernels ends: nothing of nanobind's report of leaks reaches its output."""

import subprocess
import sys
from pathlib import Path

import pytest

from warpattn.runtime.triton_exit import GLUON, release_triton

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
SIMULATED = """
import atexit, torch, warpattn as wa
def still_whole():
    import triton
    print(triton.cdiv(5, 2))
atexit.register(still_whole)
q = torch.randn(1, 64, 1, 64, dtype=torch.bfloat16)
print(wa.attention(q, q, q, backend="simulate:sm90").shape)
"""
TESTED = """
import warpattn.kernels.sm90.prefill.kernel
def test_nothing():
    pass
"""


def outputs(*arguments: str) -> str:
    """Standard output and error of a Python process, which must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_script_ends_with_its_own_last_line():
    lines = outputs("-c", SIMULATED).splitlines()
    assert lines == ["torch.Size([1, 64, 1, 64])", "3"]  # the caller's own callback still has Triton


@pytest.mark.full
def test_the_command_line_ends_with_its_own_last_line():
    last = outputs("-m", "warpattn", "simulate", "--shape", "1x64x1x64").splitlines()[-1]
    assert last.startswith("lse  largest difference")


def test_pytest_ends_with_its_own_last_line(tmp_path):
    path = tmp_path / "test_kernel.py"
    path.write_text(TESTED)
    text = outputs("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "--rootdir", str(tmp_path), str(path))
    assert text.splitlines()[-1].startswith("1 passed"), text


def test_a_process_without_gluon_is_left_alone(monkeypatch):
    import triton

    monkeypatch.delitem(sys.modules, GLUON, raising=False)
    release_triton()
    assert triton.cdiv(5, 2) == 3
