"""Finds the tuned choice of a problem; the planner prefers it to its own.

The file is read once in a process, when the first call is planned; a repeated call does not read anything here. Only
calls with the default options have tuned choices: a batch-invariant plan must not depend on what was measured.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from warpattn.errors import AttentionError
from warpattn.problem import Problem
from warpattn.problem.arch import ARCHS, Arch
from warpattn.problem.backends import card_target, chip_of
from warpattn.problem.launch import BUILT_IN, DEFAULT_OPTIONS, PlanOptions
from warpattn.runtime.kernel_cache import say_once
from warpattn.runtime.tuned import rows
from warpattn.runtime.tuned.rows import Row

TUNED_ARCHS = ("sm90",)  # architectures whose kernels have candidates


@dataclass
class Table:
    """The rows of this process by their keys. None: not read yet."""

    rows: dict[str, Row] | None = None

    def read(self) -> dict[str, Row]:
        """Return the rows, read from the file the first time; a file that cannot be used is reported once."""
        if self.rows is None:
            try:
                self.rows = rows.read(rows.path())
            except AttentionError as error:
                say_once(str(error))
                self.rows = {}
        return self.rows


TABLE = Table()


def tuned_options(problem: Problem, arch: str, device: torch.device, options: PlanOptions) -> PlanOptions:
    """Return the options of a plan on a device, with the tuned configuration if there is one."""
    fits = TABLE.read() and options == DEFAULT_OPTIONS
    row = tuned_row(problem, arch, card_of(device), card_target(device, arch)) if fits else None
    return options if row is None or row.stale else replace(options, candidate=row.candidate)


def tuned_row(problem: Problem, arch: str, card: str, target: Arch | None = None) -> Row | None:
    """Return the row of a problem on a card (target: see `PlanOptions`), which may be stale; None if there is none."""
    known = TABLE.read() if card and arch in TUNED_ARCHS else {}
    row = known.get(key_of(problem, arch, card)) if known else None
    if row is None or row.stale or row.candidate in (BUILT_IN, *configurations(problem, target).others):
        return row
    what = f"a tuned choice of {row.call} is not used: it names {row.candidate!r}"
    say_once(f"{what}, which is no configuration of this problem; tune again")
    return None


class Configurations(NamedTuple):
    """Names of a problem's configurations: the built-in one and all others; "" and () if there are no candidates."""

    built_in: str
    others: tuple[str, ...]


def configurations(problem: Problem, target: Arch | None = None) -> Configurations:
    """Return the configurations of a problem on Hopper (`target`: see `PlanOptions`); its head dims must be padded
    (`filled_problem`)."""
    from warpattn.kernels.sm90.candidates import candidates, described
    from warpattn.kernels.sm90.select import choose

    target = target or ARCHS["sm90"]
    found = candidates(problem, target)
    own = described(choose(problem, target)) if found else ""
    return Configurations(own, tuple(name for name in found if name != own))


def key_of(problem: Problem, arch: str, card: str) -> str:
    """Return the digest of everything that a choice depends on: the card, sizes, dtypes, mask, score, but not LSE and
    sinks."""
    like = replace(problem, device_type="", has_lse=False, has_sinks=False)
    return hashlib.sha256(repr((arch, card, like)).encode()).hexdigest()[:32]


def card_of(device: torch.device) -> str:
    """Return name and number of SMs of a CUDA device, such as "NVIDIA H200 (132 SMs)"; "" for any other."""
    return _card(device.index or 0) if device.type == "cuda" else ""


@cache
def _card(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name} ({properties.multi_processor_count} SMs)"


def card_here(arch: str) -> str:
    """Return the current card (`card_of`) if its architecture is `arch`, else ""."""
    if not torch.cuda.is_available():
        return ""
    device = torch.device("cuda", torch.cuda.current_device())
    return card_of(device) if chip_of(device).target == arch else ""
