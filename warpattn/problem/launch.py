"""`Choice` and `Launch`: what a plan decides and what it runs, as values that every architecture shares.

    kernels/<arch>/select.py   choose(problem)                       -> Choice          which kernel, and why
                               list_launches(checked, x, sequence)   -> (Launch, ...)   those of a call, in order

A `Launch` is complete: the simulator runs it unchanged, and a card needs only its compiled code in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from warpattn.problem.arch import Arch


@dataclass(frozen=True)
class PlanOptions:
    """What the owner of a plan requires, promises, allows and expects."""

    batch_invariant: bool = False  # requested: a sequence's bits do not depend on what else is in the batch
    kv_ready_before_dependency: bool = False  # promised: see `DecodePlan`; ignored by kernels without a use for it
    copies: bool = True  # allowed: memory for copies of keys and values, see sm90/copies
    workspace: Any = field(default=None, compare=False)  # allowed: memory of a `StepPlan` for such copies, a tensor
    decoded: int = 0  # expected: many sequences of a step have up to so many queries, see `StepPlan`
    target: Arch | None = None  # the card, where `ARCHS` has another number of SMs: an H20 has 78, a part of one fewer
    candidate: str | None = None  # requested: the configuration of this name, see sm90/candidates.py, or BUILT_IN


DEFAULT_OPTIONS = PlanOptions()
MOST_DECODED = 16  # queries of a sequence that Hopper's decode kernel takes
BUILT_IN = "built-in"  # candidate: what the plan chooses by itself
INVARIANT = "one part, so that a sequence's sums are in the same order whatever else is in the batch"
EARLY = "PDL: its CTAs may start before the preceding kernel ends"
EARLY_AND_WAITS = f"{EARLY}, and wait for its end"


@dataclass(frozen=True)
class Choice:
    """A decision about one problem: equal problems get equal choices."""

    kernel: str  # such as "prefill" or "decode"
    config: Any  # the architecture's config, a frozen value; None where nothing is left to configure
    grid: tuple[int, ...]  # programs; an upper bound where it depends on lengths that only the device knows
    lines: Callable[[], tuple[str, ...]] = field(compare=False)  # describes the config, as text
    reasons: tuple[str, ...]  # sentences that say why
    partitions: int = 1  # parts that the keys of a row are split into, at most
    order: Any = None  # of output tiles, where the kernel takes one


class TensorMap(NamedTuple):
    """An argument for a TMA descriptor whose extents and strides are not those of a tensor.

    The map begins at the tensor's address. Extents may promise more memory than there is; addresses wrap at 2**64.
    """

    tensor: Any
    box: tuple[int, ...]  # a launcher may cut its last dimension to what one swizzle covers
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    copied: tuple[int, ...] | None = None  # a box of fewer rows, which TMA copies to or from the tile's first rows


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch of one kernel."""

    name: str  # such as "sm100.prefill"
    arch: str  # of `ARCHS` in problem/arch.py
    key: Hashable  # everything the compiled code depends on beside the source files; its repr names the file on disk
    source: Callable[..., Any]  # makes the GluonASTSource to compile, with True one for `shared_code`; imports Triton
    options: Mapping[str, Any]  # of triton.compile
    grid: tuple[int, ...]
    args: Mapping[str, Any]  # every runtime argument by name: tensors (also for TMA descriptors), numbers, tuples
    persistent: int = 0  # fewest programs that do the work of any grid; 0: it needs all programs of `grid`
    pdl: bool = False  # launched with PDL: may start before the preceding kernel ends, and waits for that by itself
    tile_counter: str | None = None  # argument that points to an int32 which is 0 before the launch and after it
    l2_promotion: int = 128  # fewest bytes that L2 fetches for a TMA load
    shared_code: bool = False  # compiled with one copy of what several roles do, see runtime/shared_code
    per_step: bool = False  # reads lengths, offsets and the mask's tensors alone: all layers of a step may share it
    together: int = 1  # programs that wait for each other in a cycle: a device must run this many at once
