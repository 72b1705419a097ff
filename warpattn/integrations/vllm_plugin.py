"""What vLLM calls in each of its processes (entry point `vllm.general_plugins`): names the backend, and no more.

The backend's own module is imported by vLLM when it is chosen, so that a plug-in nobody uses costs nothing.
"""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

__all__ = ["register"]


def register() -> None:
    """Put `WarpattnBackend` behind vLLM's name CUSTOM, unless another plug-in is already there."""
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, "warpattn.integrations.vllm.WarpattnBackend")
