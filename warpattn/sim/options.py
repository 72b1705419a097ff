"""What may differ between runs of one launch: `Order`, which role and copy runs next, and `RunOptions`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from .errors import SimulationError

if TYPE_CHECKING:
    from typing import TypeGuard


class Order(NamedTuple):
    """A schedule and a seed, which repeat a run."""

    schedule: str
    seed: int


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer of Python or NumPy, not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class RunKeywords(TypedDict, total=False):
    """The fields of `RunOptions`, as keywords of `simulate`."""

    in_flight: int
    step_limit: int
    timing: bool
    fixed_order: bool
    first_finding: bool


@dataclass(frozen=True)
class RunOptions:
    """How many programs run side by side, when a run ends, and what it looks at; `simulate` describes each."""

    in_flight: int = 16
    step_limit: int = 5_000_000
    timing: bool = False
    fixed_order: bool = False
    first_finding: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise SimulationError(f"{field.name} is {value!r}; it must be True or False")
            elif not is_integer(value) or value < 1:
                raise SimulationError(f"{field.name} is {value!r}; it must be an integer from 1 on")

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> RunOptions:
        """Make options of `simulate`'s keywords; raises SimulationError for an unknown name or a wrong value."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(keywords.keys() - set(names))
        if unknown:
            raise SimulationError(f"simulate has no option {unknown[0]!r}; it has {', '.join(names)}")
        return cls(**keywords)
