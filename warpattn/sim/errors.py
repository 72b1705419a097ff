"""The error of the simulator, for code and arguments that it cannot run."""

from __future__ import annotations


class SimulationError(Exception):
    """A kernel, target or argument that the simulator cannot run: one sentence naming it and its source line."""


class StopRun(Exception):
    """Ends the run after a finding after which it cannot continue."""
