"""flash-attn's own tests, versions 2, 3 and 4, run on the drop-ins.

    git clone https://github.com/Dao-AILab/flash-attention && pip install einops
    python -m tests.peers flash-attention --version 2 --cases 20
    python -m tests.peers flash-attention --version 3 --backend simulate:sm90 --largest 200 --cases 3
    python -m tests.peers flash-attention --version 4 --backend cuda -n 15

The suites have millions of combinations, so `--cases` of each test are drawn, the same ones for the same `--seed`. They
run from a copy, in which no memory is filled first; off a card "cuda" reads "cpu", batches of more than five have two
sequences, loops of ten and more three turns and, simulated, splits and packed groups are not repeated. What `plugin`
lists with a reason is counted apart; all else must pass. Other arguments go to pytest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

SUITES = {
    2: ("tests", ("test_flash_attn.py",)),
    3: ("hopper", ("test_flash_attn.py", "test_util.py", "padding.py")),
    4: (
        "tests/cute",
        (
            "test_flash_attn.py",
            "test_flash_attn_fast.py",
            "test_flash_attn_varlen.py",
            "test_flash_attn_combine.py",
            "test_flash_attn_race_condition.py",
        ),
    ),
}
ONCE = ("FLASH_ATTENTION_DISABLE_SPLIT", "FLASH_ATTENTION_DISABLE_PACKGQA")


def copied(checkout: Path, version: int, backend: str, folder: Path) -> list[str]:
    """The suite in `folder`, as the backend can run it; its test files."""
    source, files = SUITES[version]
    for name in files:
        text = (checkout / source / name).read_text()
        text = text.replace("70 * 1024 ** 3", "1")  # memory that a test would fill first, in each worker
        (folder / name).write_text(text if backend == "cuda" else on_a_cpu(text))
    if version == 4:
        shutil.copy(checkout / "flash_attn/cute/testing.py", folder / "cute_testing.py")
    return [str(folder / name) for name in files if name.startswith("test_flash")]


def on_a_cpu(text: str) -> str:
    """A suite's text with tensors on the CPU, batches of two sequences, and three of many repetitions."""
    text = re.sub(r"""(["'])cuda\1""", '"cpu"', text).replace(".cuda()", ".cpu()")
    text = re.sub(r"range\(\d+0\)", "range(3)", text).replace("else 1000", "else 3")
    return re.sub(r"^( +batch_size) = (?:[6-9]|\d{2,})\b.*$", r"\1 = 2", text, flags=re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a suite; pytest's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of flash-attention")
    parser.add_argument("--version", type=int, choices=SUITES, default=2)
    parser.add_argument("--backend", default="reference", help='"reference", "simulate:sm90" (or another), or "cuda"')
    parser.add_argument("--cases", type=int, default=20, help="combinations drawn of each test")
    parser.add_argument("--largest", type=int, default=1024, help="the longest sequence that is drawn")
    parser.add_argument("--seed", type=int, default=0)
    args, rest = parser.parse_known_args(argv)
    draw = {"version": args.version, "backend": args.backend, "cases": args.cases, "largest": args.largest}
    os.environ.update({f"PEERS_{name.upper()}": str(value) for name, value in (draw | {"seed": args.seed}).items()})
    if args.backend.startswith("simulate"):
        os.environ.update(dict.fromkeys(ONCE, "TRUE"))
    with tempfile.TemporaryDirectory() as folder:
        files = copied(args.checkout, args.version, args.backend, Path(folder))
        os.environ["PEERS_FOLDER"] = folder
        sys.path.insert(0, folder)
        options = ["-c", "/dev/null", "--rootdir", folder, "-p", "no:cacheprovider", "-p", "tests.peers.plugin", "-q"]
        return int(pytest.main([*options, *files, *rest]))


if __name__ == "__main__":
    sys.exit(main())
