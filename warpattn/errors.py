"""Checks of what a user passes: every broken rule is collected, then raised at once.

One call can break several rules (a wrong dtype and a wrong head ratio). Raising at the first one makes users fix them
one by one, so a `Rules` value gathers (what, rule) pairs and `done()` raises a single `AttentionError` listing all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from warpattn.inputs import kind_of, tensor_fault


def many(count: int, noun: str) -> str:
    """Say a number of things: "1 tile", "2 tiles"."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


class AttentionError(ValueError):
    """Input that breaks one or more rules.

    `reasons` holds one sentence per broken rule: the argument, its value and the rule. `str()` is that sentence when
    there is one, else a bulleted list of all. An error made from plain text (`AttentionError("...")`) has one reason.
    """

    @property
    def reasons(self) -> tuple[str, ...]:  # torch.compile cannot trace an initialiser
        """One sentence for each broken rule."""
        return self.args

    def __str__(self) -> str:
        if len(self.reasons) == 1:
            return self.reasons[0]
        return "\n".join([f"{len(self.reasons)} rules are broken:", *(f"  - {reason}" for reason in self.reasons)])


@dataclass(slots=True)
class Rules:
    """Collects every broken rule of one call.

    >>> rules = Rules()
    >>> rules.require(False, "q has shape (2, 3)", "q must be rank 4 (batch, seq, heads, head_dim)")
    False
    >>> rules.done()
    Traceback (most recent call last):
    ...
    warpattn.errors.AttentionError: q has shape (2, 3); q must be rank 4 (batch, seq, heads, head_dim)
    """

    broken: list[str] = field(default_factory=list)

    def add(self, what: str, rule: str) -> None:
        """Note a broken rule: the argument with its value, and the rule."""
        reason = f"{what}; {rule}"
        if reason not in self.broken:
            self.broken.append(reason)

    def require(self, ok: bool, what: str, rule: str) -> bool:
        """Note `what` (argument and value) and the `rule` it breaks unless `ok`.

        Returns `ok`, so that checks that depend on this one can be skipped.
        """
        if not ok:
            self.add(what, rule)
        return bool(ok)

    def flag(self, name: str, value: object) -> bool:
        """Require True or False, and nothing that only counts as one of them."""
        return self.require(isinstance(value, bool), f"{name} is {kind_of(value)}", f"{name} must be True or False")

    def tensor(self, name: str, value: Any, *axes: str) -> bool:
        """Require a tensor that attention can read, with one dimension per name in `axes`."""
        fault = tensor_fault(value)
        if fault is not None:
            self.add(f"{name} {fault.what}", f"{name} {fault.rule}")
            return False
        rank = value.ndim == len(axes)
        if not rank:
            self.add(f"{name} has shape {tuple(value.shape)}", f"{name} must be rank {len(axes)} ({', '.join(axes)})")
        return rank

    def done(self) -> None:
        """Raise one `AttentionError` with every reason noted so far; do nothing when there is none."""
        if self.broken:
            raise AttentionError(*self.broken)
