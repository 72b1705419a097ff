"""Cache of launches of one function: a repeated call on other tensors only writes addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from warpattn.errors import AttentionError, Rules
from warpattn.problem.backends import NEEDS, chip_of
from warpattn.problem.gradients import refuse_transforms
from warpattn.problem.launch import Launch
from warpattn.problem.operands import ALIGNMENT
from warpattn.runtime import cuda
from warpattn.runtime.bound_launches import BoundLaunches, launch_all

KEPT = 256  # most entries of each function
Tensors = Sequence[Tensor | None]


class RepeatedCalls:
    """Launches of one function's calls. The kernel reads rows of the first `rows` tensors as vectors, so their
    alignment is part of the key; `option`, one value, is everything else that decides about a launch. `names` of the
    tensors are given where one with a forward-mode tangent is refused.

    Launches are kept for the next call with tensors of the same shapes, strides and dtypes, which skips rules and
    planning.
    """

    def __init__(self, name: str, rows: int, names: tuple[str, ...] = ()) -> None:
        self.name, self.rows, self.names = name, rows, names
        self._known: dict[Hashable, BoundLaunches] = {}

    def launched_again(self, tensors: Tensors, option: Hashable) -> bool:
        """Launch if a call like this one has been checked and launched before; False if not, or if the call is unusual
        in any way."""
        try:
            addresses, key = self._identify(tensors, option)
            bound = self._known.get(key)
        except (AttributeError, RuntimeError, TypeError):
            return False
        if bound is None or cuda.current_device() != bound.device:
            return False
        bound(addresses, ())
        return True

    def launch(self, tensors: Tensors, option: Hashable, launches_on: Callable[[str], tuple[Launch, ...]]) -> None:
        """Launch the kernel of the card's architecture on torch's current stream, and keep the launches."""
        if forward_ad._current_level >= 0:
            rules, named = Rules(), zip(self.names, tensors, strict=False)
            refuse_transforms(rules, named, f"{self.name} has no derivatives on a card")
            rules.done()
        first = tensors[0]
        assert first is not None
        chip = chip_of(first.device)
        if chip.arch is None:
            what = f"the tensors are on {first.device}" + (f", {chip.words}" if chip.words else "")
            raise AttentionError(f"{what}; {self.name} needs {' or '.join(NEEDS.values())}, or the CPU")
        device = first.get_device()
        with torch.cuda.device(device):
            bound = launch_all(launches_on(chip.arch), device)
        try:
            bound.follow(tensors)
            _, key = self._identify(tensors, option)
        except (LookupError, TypeError):  # one tensor is given for two, or one is a subclass
            return
        if len(self._known) >= KEPT:
            self._known.clear()
        self._known[key] = bound

    def _identify(self, tensors: Tensors, option: Hashable) -> tuple[tuple[int, ...], Hashable]:
        """Return addresses, 0 for None, and the key: all that rules and launches depend on. Raises TypeError for
        subclasses of Tensor and tensors with a gradient or a tangent, AttributeError and RuntimeError for what is no
        tensor in memory. It is one loop because each call pays for it."""
        if forward_ad._current_level >= 0:
            raise TypeError  # tangents of forward-mode derivatives are beside the tensors
        gradients = torch.is_grad_enabled()
        addresses: list[int] = []
        key: list[Hashable] = [type(option), option]  # 1 is not True
        for x in tensors:
            if x is None:
                addresses.append(0)
                key.append(None)
                continue
            if type(x) is not Tensor or (gradients and x.requires_grad):
                raise TypeError
            addresses.append(x.data_ptr())
            key += (x.shape, x.stride(), x.dtype, x.get_device())
        together = 0
        for address in addresses[: self.rows]:
            together |= address
        key.append(together % ALIGNMENT == 0)
        return tuple(addresses), tuple(key)
