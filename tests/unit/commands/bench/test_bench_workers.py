"""Benchmarks that compile in several processes."""

import ast
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from bench.measure import workers

BENCH = Path(__file__).parents[4] / "bench"
PROGRAMS = [path for path in sorted(BENCH.rglob("*.py")) if "__main__" in path.stem + path.read_text()[-999:]]


def test_jobs_of_processes_that_fail_have_no_entry(capfd):
    fine, raises, dies = partial(partial, dict, x=1), partial(int, "x"), partial(os._exit, 3)
    assert dict(workers.run([fine, dies, raises], 2)) == {0: {"x": 1}, 1: None, 2: None}
    assert "ValueError: invalid literal" in capfd.readouterr().err


WORK = "__import__('os').write(1, b'begun\\n'); __import__('time').sleep(60)"
PROGRAM = """
import signal, sys
from functools import partial
from multiprocessing import get_context
from bench.measure import arguments, workers

def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    return list({call})

if __name__ == "__main__":
    sys.exit(arguments.status(main))
"""


OF_ITS_OWN = f"Process(target=arguments.status, args=(partial(exec, {WORK!r}),))"  # a process that gets Ctrl-C, too
CALLS = [
    f"workers.compiled([(exec, {WORK!r})] * 3, 2)",
    f"workers.run([partial(exec, {WORK!r})] * 3, 2)",
    f"(p := get_context('spawn').{OF_ITS_OWN}, p.start(), p.join())",
]


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_ends_all_processes_without_a_word(call):
    """A terminal sends Ctrl-C to all processes of a command."""
    line = [sys.executable, "-c", PROGRAM.format(call=call)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as p:
        assert p.stdout and p.stdout.readline() == "begun\n"
        os.killpg(p.pid, signal.SIGINT)
        out, err = p.communicate(timeout=30)  # less than the processes' work: they have ended
        assert (p.returncode, err) == (130, "") and set(out.split()) <= {"begun"}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(BENCH)))
def test_every_program_ends_so(path):
    last = ast.unparse(ast.parse(path.read_text()).body[-1]).splitlines()[-1].strip()
    assert re.fullmatch(r"sys\.exit\((arguments\.)?status\((main|partial\(main, .*\))\)\)", last)


def test_results_of_processes_come_in_order():
    done = list(workers.compiled([(int, "1"), (int, "x"), (int, "3")], 2))
    assert [done[0].result(), str(done[1].exception())[:19], done[2].result()] == [1, "invalid literal for", 3]
    assert not list(workers.compiled([]))


@pytest.mark.full
def test_nothing_is_prepared_when_patience_has_ended():
    assert dict(workers.run([partial(partial, dict, x=1)], 1, 0.0)) == {0: None}
