"""Reports as JSON and as one HTML page: source lines, barriers, the last operations of each role."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from typer.testing import CliRunner

from tests.sim.machine.findings.test_faults import copy, ring
from tests.sim.machine.kernels import launched as launched_kernels
from warpattn.cli.app import app
from warpattn.sim import SimulationError
from warpattn.sim.host.launches import launches

ALONE = {"meta", "link", "br"}


class Page(HTMLParser):
    """Text of a page; every element must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.said = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}, "one page without any other file"
        if tag not in ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said += data


def saved(report, path: Path) -> str:
    report.save_report(path)
    return path.read_text()


def test_json_has_every_finding_with_its_lines_and_run(tmp_path: Path) -> None:
    report, _ = ring("lost_arrive", schedules="all")
    (launch,) = json.loads(saved(report, tmp_path / "r.json"))
    assert launch["kernel"] == "ring_kernel" and launch["grid"] == [1, 1, 1] and len(launch["runs"]) == 4
    found = next(each for each in launch["findings"] if each["kind"] == "Deadlock")
    assert found["seen"] == {"schedule": "eager", "seed": 0, "runs": 4, "of": 4}
    assert "mbarrier.wait" in found["places"][0]["lines"][0]["text"] and found["barrier"] == "full[1]"
    (program,) = launch["programs"]
    states = {barrier["name"]: barrier for barrier in program["barriers"]}
    assert states["full[1]"]["arrived"] == 0 and states["full[1]"]["count"] == 1 and states["full[1]"]["live"]
    roles = {role["role"]: role for role in program["roles"]}
    assert not roles["consume"]["ended"] and "barrier full[1]" in roles["consume"]["waits"]
    assert roles["consume"]["events"][-1]["op"] == "ttng.wait_barrier"


def test_the_page_shows_source_lines_barriers_and_last_operations(tmp_path: Path) -> None:
    report, _ = ring("lost_arrive")
    page = Page(saved(report, tmp_path / "r.html"))
    text = " ".join(page.said.split())
    assert "ring_kernel[1, 1, 1]: 1 findingschedule" in text  # the head of a table follows
    assert "Deadlock" in text and "full[1]" in text
    assert re.search(r"mbarrier\.wait\(full\.index", text) and "ttng.wait_barrier" in text
    assert "consume waits for barrier full[1]" in text


def test_the_program_beside_which_something_was_found_is_there() -> None:
    report, _ = copy("no_wait")
    assert {program.index for program in report.programs} == {(0, 0, 0), (1, 0, 0)}
    assert all(role.ended and role.events for program in report.programs for role in program.roles)
    clean, _ = copy("")
    assert len(clean.programs) == 1, "of a clean run the first program stands for all"


def test_all_launches_of_a_program(tmp_path: Path) -> None:
    with launches("sm90") as runs:
        x = torch.ones(32)
        launched_kernels.add_kernel[(1,)](x, x, x, 32, BLOCK=32)
        launched_kernels.colliding_kernel[(2,)](x, torch.empty(16), BLOCK=16)
    first, second = json.loads(saved(runs, tmp_path / "r.json"))
    assert not first["findings"] and [each["kind"] for each in second["findings"]] == ["Race"]
    assert "&lt;" not in Page(saved(runs, tmp_path / "r.html")).said
    with pytest.raises(SimulationError, match=r"r.txt'; write a name that ends with .html or .json"):
        runs.save_report(tmp_path / "r.txt")


def test_the_command_line(tmp_path: Path) -> None:
    line = ("simulate", "--shape", "1x70x1x64", "--schedule", "lazy", "--report", str(tmp_path / "r.html"))
    found = CliRunner().invoke(app, line)
    assert found.exit_code == 0 and "wrote" in found.output, found.output
    assert "no findings" in Page((tmp_path / "r.html").read_text()).said
    found = CliRunner().invoke(app, ("simulate", "--report", str(tmp_path / "r.pdf")))
    assert found.exit_code == 1 and "ends with .html or .json" in " ".join(found.output.replace("│", " ").split())
