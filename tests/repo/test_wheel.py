"""What is installed: one pure-Python wheel that holds the package and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    assert found.name.endswith("-py3-none-any.whl")
    return zipfile.ZipFile(found)


def test_it_holds_the_package_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == {str(path.relative_to(ROOT)) for path in (ROOT / "warpattn").rglob("*.py")}


def test_it_states_what_it_needs(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = wheel.read(name).decode()
    for line in (
        "Requires-Python: >=3.10",
        "License-Expression: Apache-2.0",
        "Requires-Dist: triton<3.10,>=3.9; python_version >= '3.11'",
        "Provides-Extra: cli",
    ):
        assert line in metadata.splitlines()
