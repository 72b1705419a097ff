"""What `make test-engine` says of the tests of a file."""

from __future__ import annotations

from tests.engine.__main__ import main, report

OUTPUT = """...
SKIPPED [1] tests/engine/test_vllm_card.py:80: needs a card
SKIPPED [2] tests/engine/test_vllm_card.py:111: needs a card
FAILED tests/engine/test_vllm.py::test_speculation - AssertionError
"""


def test_counts_reasons_and_failures():
    ran = report("test_vllm", 1, OUTPUT + "==== 1 failed, 4 passed, 3 skipped, 2 warnings in 3.10s ====\n")
    assert ran.counts == {"failed": 1, "passed": 4, "skipped": 3} and not ran.fine
    assert ran.skipped == ("3 skipped: needs a card",)
    assert str(ran).split() == ["test_vllm", "3", "s", "1", "failed,", "4", "passed,", "3", "skipped", "FAILED"]


def test_a_process_that_ended_by_a_signal_is_no_success():
    assert not report("test_vllm", -9, "").fine
    assert report("test_vllm_card", 5, "2 deselected in 0.1s").fine  # nothing was chosen


def test_a_name_that_no_file_has(capsys):
    assert main(["test_wllm", "--", "-q"]) == 2
    assert capsys.readouterr().out == "tests/engine has no test_wllm\n"
