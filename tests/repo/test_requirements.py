"""The pins: exact, each with hashes, and for every Python that the kernels promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in ROOT.glob("requirements*.txt"))
PIN = re.compile(r"[A-Za-z0-9_.-]+==[\w.+]+(?: ; [^\\]+)?(?: --hash=sha256:[0-9a-f]{64})+")


def requirements(name: str) -> list[str]:
    """The requirements of a file, each on one line."""
    lines = (line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#"))
    return re.sub(r" *\\\n +", " ", "\n".join(lines)).splitlines()


@pytest.mark.parametrize("name", FILES)
def test_every_pin_is_exact_and_has_hashes(name):
    found = requirements(name)
    assert found and [line for line in found if not PIN.fullmatch(line)] == []


def test_no_package_is_pinned_twice():
    names = [line.partition("==")[0].lower() for name in FILES if name != "requirements-torch-cpu.txt"
             for line in requirements(name)]  # fmt: skip
    assert len(names) == len(set(names))


def test_the_makefile_checks_the_hashes_of_all():
    text = (ROOT / "Makefile").read_text()
    assert "PINNED := $(PY) -m pip install --quiet --no-compile --require-hashes --no-deps -r" in text
    assert [name for name in FILES if f"$(PINNED) {name}" not in text] == []
