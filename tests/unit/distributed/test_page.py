"""The program of docs/distributed.md runs with the command that the page gives."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "distributed.md").read_text()


@pytest.mark.full
def test_the_program_of_the_page_runs_under_torchrun(tmp_path: Path):
    (listing,) = re.findall(r"^```py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (command,) = re.findall(r"^torchrun (.*) ring\.py$", PAGE, re.MULTILINE)
    (tmp_path / "ring.py").write_text(listing)
    run = [sys.executable, "-m", "torch.distributed.run", *command.split(), "--standalone", "ring.py"]
    alone = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(run, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, largest difference from one: " in done.stdout
