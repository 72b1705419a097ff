"""All tests of real engines, a process for each file: what ran, how long, what was skipped and why.

    python -m tests.engine [test_vllm ...] [-- arguments of pytest]        what `make test-engine` calls

An engine changes what others in its process find (vLLM 0.32 fails after one with n-grams), and a hanging one is ended.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from threading import Timer
from typing import NamedTuple

FOLDER = Path(__file__).parent
LONGEST = 1800  # seconds of a file
NONE_CHOSEN = 5  # pytest's exit status
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] \S+: (.*)$", re.MULTILINE)
TIME = re.compile(r" in ([\d.]+)s")
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected)")


class Ran(NamedTuple):
    """A file's tests."""

    name: str
    seconds: float
    fine: bool
    counts: dict[str, int]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        told = ", ".join(f"{number} {what}" for what, number in self.counts.items()) or "nothing ran"
        return f"{self.name:<20}{self.seconds:6.0f} s   {told}{'' if self.fine else '   FAILED'}"


def run(file: Path, arguments: list[str]) -> Ran:
    """The tests of one file, whose output appears as they run."""
    command = [sys.executable, "-m", "pytest", "-m", "engine", "-W", "default", "-rs", str(file), *arguments]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        end = Timer(LONGEST, process.kill)
        end.start()
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
        end.cancel()
    return report(file.stem, process.returncode, "".join(lines))


def report(name: str, status: int, output: str) -> Ran:
    """What pytest's output says; its last line has counts and time."""
    last = output.strip().rpartition("\n")[2]
    counts = {what: int(number) for number, what in COUNTED.findall(last)}
    reasons: Counter[str] = Counter()
    for number, why in SKIPPED.findall(output):
        reasons[why] += int(number)
    seconds = TIME.search(last)
    skipped = tuple(f"{number} skipped: {why}" for why, number in reasons.items())
    return Ran(name, float(seconds[1]) if seconds else 0.0, status in (0, NONE_CHOSEN), counts, skipped)


def main(arguments: list[str]) -> int:
    """0 if all files ran without a failure; every file runs, whatever another found."""
    border = arguments.index("--") if "--" in arguments else len(arguments)
    names, others = arguments[:border], arguments[border + 1 :]
    files = [file for file in sorted(FOLDER.glob("test_*.py")) if not names or file.stem in names]
    unknown = set(names) - {file.stem for file in files}
    if unknown:
        print(f"tests/engine has no {', '.join(sorted(unknown))}")
        return 2
    ran = [run(file, others) for file in files]
    print()
    for one in ran:
        print(one, *one.skipped, sep="\n" + " " * 31)
    total = sum(one.counts.get("passed", 0) for one in ran)
    print(f"{total} passed in {sum(one.seconds for one in ran):.0f} s")
    return 0 if all(one.fine for one in ran) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
