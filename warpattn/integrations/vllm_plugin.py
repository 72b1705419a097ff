"""The plug-in that vLLM loads in each process (entry point `vllm.general_plugins`): it only registers the backend.

vLLM imports the backend's own module when it is chosen, so an unused plug-in costs nothing.
"""

from __future__ import annotations

import contextlib
import re
import warnings

import vllm
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

NAME = "WARPATTN"
PATH = "warpattn.integrations.vllm.WarpattnBackend"
LATENT = {"WARPATTN_MLA": "warpattn.integrations.vllm.latent.WarpattnMLABackend"}
VERSIONS = ((0, 26), (0, 33))  # of vLLM whose interface was read: oldest, newest


def register() -> None:
    """Register our backends as WARPATTN and WARPATTN_MLA if vLLM takes new names (0.32 does), and the former as CUSTOM
    unless another plug-in has that; warns once about a version of vLLM outside of `VERSIONS`."""
    check_version(getattr(vllm, "__version__", ""))
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # an enumeration that is closed
        for name, path in ({NAME: PATH} | LATENT).items():
            register_backend(name, path)
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, PATH)


def check_version(version: str) -> None:
    """Warn about a version outside of `VERSIONS`; one that cannot be read passes."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return
    oldest, newest = VERSIONS
    if not oldest <= (int(found[1]), int(found[2])) <= newest:
        listed = " to ".join(".".join(map(str, each)) for each in VERSIONS)
        warnings.warn(f"vLLM is {version}; warpattn's backend was written for {listed}", stacklevel=3)
