"""What is installed: one small pure-Python wheel that imports nothing beyond torch and computes once it is there."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZE_LIMIT = 5 * 2**18  # bytes; see DESIGN.md
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
        "Requires-Dist: torch>=2.11",
        "Provides-Extra: kernels",
        "Requires-Dist: triton<3.10,>=3.9; (python_version >= '3.11') and extra == 'kernels'",
        "Provides-Extra: cli",
    ):
        assert line in metadata.splitlines()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert not [line for line in needed if "triton" in line], "torch 2.11 to 2.14 pin another: nothing would resolve"


def test_its_entry_points_exist(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    points = [line.partition(" = ")[2] for line in wheel.read(name).decode().splitlines() if " = " in line]
    assert len(points) == 4
    for point in points:
        module, _, function = point.partition(":")
        assert f"def {function or 'pytest_configure'}(" in wheel.read(f"{module.replace('.', '/')}.py").decode()


def test_it_is_small(wheel):
    assert Path(wheel.filename).stat().st_size < SIZE_LIMIT


def test_a_new_user_has_a_result(wheel, tmp_path):
    """Installed into a bare folder, beside nothing but torch and what it needs: the first call is right."""
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


def test_importing_it_costs_little():
    """Beside torch it imports itself and the standard library, and of itself neither simulator nor command line."""
    program = "import sys, torch; known = set(sys.modules); import warpattn; print(*sorted(set(sys.modules) - known))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    found = done.stdout.split()
    assert {name.partition(".")[0] for name in found} - sys.stdlib_module_names == {"warpattn"}
    assert not [name for name in found if name.startswith(("warpattn.sim", "warpattn.cli", "warpattn.kernels.pieces"))]
