"""What is installed: one small pure-Python wheel, quick to import, that computes as soon as it is there."""

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZE_LIMIT = 2**20  # bytes
IMPORT_LIMIT = 0.2  # seconds of this process beyond what torch needs
USER_LIMIT = 60.0  # seconds from `pip install` of the wheel to a result, torch being there
FIRST_RESULT = """
import torch, warpattn as wa
q, k, v = (torch.randn(1, 200, 2, 64) for _ in range(3))
ours = wa.attention(q, k, v, mask=wa.Causal())
heads = (x.transpose(1, 2) for x in (q, k, v))
theirs = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
assert torch.allclose(ours, theirs, atol=1e-5)
print(wa.__file__)
"""


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


def test_its_entry_points_exist(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    points = [line.partition(" = ")[2] for line in wheel.read(name).decode().splitlines() if " = " in line]
    assert len(points) == 2
    for point in points:
        module, _, function = point.partition(":")
        assert f"def {function}(" in wheel.read(f"{module.replace('.', '/')}.py").decode()


def test_it_is_small(wheel):
    assert Path(wheel.filename).stat().st_size < SIZE_LIMIT


def test_a_new_user_has_a_result_soon(wheel, tmp_path):
    """Installed into a bare folder, beside nothing but torch and what it needs: the first call is right."""
    start = time.perf_counter()
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path),
        wheel.filename,
    ]
    subprocess.run(install, check=True, capture_output=True)
    import torch

    beside = Path(torch.__file__).parents[1]
    # -S: no site-packages but those named, so that an editable install of this repository is not found.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(beside)))}
    done = subprocess.run(
        [sys.executable, "-S", "-c", FIRST_RESULT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path / "warpattn" / "__init__.py"
    assert time.perf_counter() - start < USER_LIMIT


def test_importing_it_costs_little():
    program = "import time, torch; start = time.process_time(); import warpattn; print(time.process_time() - start)"
    command = [sys.executable, "-c", program]
    runs = (subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True) for _ in range(3))
    assert any(float(run.stdout) <= IMPORT_LIMIT for run in runs)  # a busy machine may be slow once
