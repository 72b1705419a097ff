"""The launches of a backward call on Hopper."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...nvidia.backward.captured_launch import captured_launches
from ...nvidia.backward.launch import BackwardKernels, backward_launches
from .config import choose


def _device_code() -> Any:
    from .kernel import DEVICE_CODE  # imports Triton

    return DEVICE_CODE


KERNELS = BackwardKernels("sm90", choose, _device_code)
list_backward_launches = partial(backward_launches, KERNELS)
list_captured_launches = partial(captured_launches, KERNELS)
