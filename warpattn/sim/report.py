"""The result of a run, or of a sweep of runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from .errors import SimulationError
from .machine.states import ProgramState
from .memory.findings import Finding, many
from .page import save
from .timing.replay import Timing
from .timing.timeline import Window, chrome_trace, timeline_svg


@dataclass
class Report:
    """Findings of a run, and how to repeat it; its `timing` if simulated with timing=True.

    notes: remarks, no faults with the Triton in use, such as about a fence that Triton inserts. runs: in a sweep the
    report of each run; findings and notes are then those of all runs, each once, and say which run repeats them,
    schedule, seed and timing are those of the first run, and steps and seconds are sums. programs: the final states of
    the first program and of those with findings; in a sweep, of its first run with a finding.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    schedule: str = "eager"
    seed: int = 0
    steps: int = 0
    seconds: float = 0.0
    timing: Timing | None = None
    kernel: str = ""
    grid: tuple[int, ...] = ()
    programs: tuple[ProgramState, ...] = ()
    runs: tuple[Report, ...] = ()

    @property
    def clean(self) -> bool:
        return not self.findings

    def of_kind(self, kind: str) -> list[Finding]:
        """Findings of one kind."""
        return [finding for finding in self.findings if finding.kind == kind]

    def save_timeline(
        self,
        path: str | PathLike[str],
        start: float = 0.0,
        end: float | None = None,
        program: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Write an SVG picture of one program's roles and engines; needs a run with timing=True.

        start, end: the cycles to show; without an end, the first 16,000 from the start at most.
        """
        Path(path).write_text(timeline_svg(self._times(), program, Window(start, end)))

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write a trace of all programs for Perfetto or chrome://tracing; needs a run with timing=True."""
        Path(path).write_text(json.dumps(chrome_trace(self._times())))

    def save_report(self, path: str | PathLike[str]) -> None:
        """Write findings, source lines, barriers and each role's last operations as .json or as one .html page."""
        save([self], path)

    def _times(self) -> Timing:
        if self.timing is None:
            raise SimulationError("this run has no timeline; simulate with timing=True")
        return self.timing

    def __str__(self) -> str:
        order = many(len(self.runs), "run") if self.runs else f"schedule {self.schedule!r}, seed {self.seed}"
        head = f"{many(len(self.findings), 'finding')} ({order}, {many(self.steps, 'step')})"
        notes = (f"  note: {note}" for note in self.notes)
        return "\n".join([head, *(f"  {finding}" for finding in self.findings), *notes])
