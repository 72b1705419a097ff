"""The one error of the simulator: what cannot be run, and its source line."""

from __future__ import annotations


class SimulationError(Exception):
    """A kernel, target or argument that the simulator cannot run: one sentence naming it and its source line."""


class StopRun(Exception):
    """Ends the run after a finding that leaves nothing to go on with."""
