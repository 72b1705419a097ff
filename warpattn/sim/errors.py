"""The error of the simulator, for code and arguments that it cannot run."""

from __future__ import annotations


class SimulationError(Exception):
    """A kernel, target or argument that the simulator cannot run: one sentence naming it and its source line."""


def of_type(value: object) -> str:
    """Describe a value by its type: "an int", "a list"; None by its name."""
    name = type(value).__name__
    return "None" if value is None else f"a{'n' * (name[:1] in tuple('AEIOaeio'))} {name}"


class StopRun(Exception):
    """Ends the run after a finding after which it cannot continue."""
