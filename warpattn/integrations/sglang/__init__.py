"""warpattn as an attention backend of SGLang (0.5.23), chosen by name once both are installed.

    python -m sglang.launch_server --model-path MODEL --attention-backend warpattn --page-size 16

`register` is what SGLang calls in each of its processes (entry point `sglang.srt.plugins`); the backend's own module is
imported when it is chosen.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

NAME = "warpattn"


def register() -> None:
    """Make `--attention-backend warpattn` known to SGLang."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create)


def _create(runner: Any) -> Any:
    from warpattn.integrations.sglang.backend import WarpattnAttnBackend

    return WarpattnAttnBackend(runner)
