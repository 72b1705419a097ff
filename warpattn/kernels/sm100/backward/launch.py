"""The launches of a backward call on Blackwell."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...nvidia.backward.captured_launch import captured_launches
from ...nvidia.backward.launch import BackwardKernels, backward_launches
from .config import choose


def _main_source(*of: Any) -> Any:
    from .signature import main_source  # imports Triton

    return main_source(*of)


def _captured_source(*of: Any) -> Any:
    from .signature import captured_source  # imports Triton

    return captured_source(*of)


KERNELS = BackwardKernels("sm100", choose, _main_source, _captured_source)
list_backward_launches = partial(backward_launches, KERNELS)
list_captured_launches = partial(captured_launches, KERNELS)
