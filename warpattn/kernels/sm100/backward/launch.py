"""The launches of a backward call on Blackwell."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...nvidia.backward.launch import MainKernel, backward_launches
from .config import choose


def _main_source(*of: Any) -> Any:
    from .signature import main_source  # imports Triton

    return main_source(*of)


list_backward_launches = partial(backward_launches, MainKernel("sm100", choose, _main_source))
