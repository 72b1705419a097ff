"""The timeline of a simulated run as text, for figures that are compared with the committed ones."""

from __future__ import annotations

from warpattn.sim import Report
from warpattn.sim.timing.timeline import Window, timeline_svg


def timeline(report: Report, start: float = 0.0, end: float | None = None) -> str:
    """The SVG of the first program, from cycle `start` to `end` (None: at most 16,000 cycles)."""
    assert report.timing is not None, "the run was not timed"
    return timeline_svg(report.timing, (0, 0, 0), Window(start, end))
