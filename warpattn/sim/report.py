"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from .findings import Finding


@dataclass
class Report:
    """Findings of a run, and how to repeat it."""

    findings: list[Finding] = field(default_factory=list)
    schedule: str = "eager"
    seed: int = 0
    steps: int = 0
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not self.findings

    def of_kind(self, kind: str) -> list[Finding]:
        """Findings of one kind."""
        return [finding for finding in self.findings if finding.kind == kind]

    def __str__(self) -> str:
        head = f"{len(self.findings)} findings (schedule {self.schedule!r}, seed {self.seed}, {self.steps} steps)"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])
