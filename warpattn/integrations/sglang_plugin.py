"""The plug-in that SGLang loads in each process (entry point `sglang.srt.plugins`): it only registers the backend.

The backend's own module is imported when it is chosen, so an unused plug-in costs nothing.
"""

from __future__ import annotations

from typing import Any

NAME = "warpattn"


def register() -> None:
    """Make `--attention-backend warpattn` known to SGLang."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create)


def _create(runner: Any) -> Any:
    from warpattn.integrations.sglang import WarpattnAttnBackend

    return WarpattnAttnBackend(runner)
