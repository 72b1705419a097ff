"""The workspace that an engine's step plans copy keys into, see `StepPlan`."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.masks import Mask, SlidingWindow
from warpattn.problem.backends import chip_of
from warpattn.problem.memory import COPIED_BYTES, COPIED_KEYS
from warpattn.quantized import EIGHT_BIT
from warpattn.runtime.kernel_cache import say_once
from warpattn.sequences import PagedKV


def workspace_bytes(device: torch.device) -> int:
    """Return the bytes of a workspace on a device; 0 if its kernels make no copies of keys."""
    return COPIED_BYTES if chip_of(device).arch == "sm90" else 0


def reserve_workspace(device: torch.device) -> None:
    """Allocate the memory of a workspace and free it again, for engines that measure what they need."""
    if size := workspace_bytes(device):
        torch.empty(size, dtype=torch.uint8, device=device)


class StepWorkspace:
    """The workspace of plans whose steps never overlap, allocated for the first plan that may need it."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._full = False  # the card had no memory for it

    def of(self, kv: PagedKV, mask: Mask) -> Tensor | None:
        """Return the memory for a plan over such pages; None if the plan would have no copies of keys and, with a line
        that says so, if the card has no memory left."""
        device, pages = kv.k_pages.device, kv.k_pages
        gains = pages.dtype in EIGHT_BIT or pages.shape[1] < COPIED_KEYS
        size = workspace_bytes(device)
        if not size or not gains or isinstance(mask, SlidingWindow) or self._full:
            return None
        if self._memory is None:
            try:
                self._memory = torch.empty(size, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:
                self._full = True
                memory = f"the card has no {size >> 20} MiB left for copies of keys"
                say_once(f"{memory}: long prompts take longer, as prefill reads pages in each tile")
        return self._memory
