"""What ran the benchmark: card, driver, versions. Read only; the card's settings are never touched."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from typing import Any

import torch

from bench.peers.adapter import installed_version

PACKAGES = ("torch", "triton", "nvidia-cudnn-cu13", "flash-attn-4", "nvidia-cutlass-dsl", "flashinfer-python", "max",
            "vllm", "transformers", "diffusers", "sglang")  # fmt: skip


def describe() -> dict[str, Any]:
    """Card, driver, memory and processor; the card's fields are None without one."""
    found: dict[str, Any] = {
        "gpu": None,
        "driver": _nvidia_smi("driver_version"),
        "power_limit": _nvidia_smi("power.limit"),
        "cuda": torch.version.cuda,
        "cpu_count": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": card.name,
            "multiprocessors": card.multi_processor_count,
            "memory_gib": round(card.total_memory / 2**30, 1),
            "capability": f"{card.major}.{card.minor}",
        }
    return found


def versions() -> dict[str, str | None]:
    """Installed versions of everything that takes part; None where it is not installed."""
    return {name: installed_version(name) for name in PACKAGES}


def _nvidia_smi(field: str) -> str | None:
    """One field of the first card, such as the driver's version, where nvidia-smi is there."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    return answer.stdout.splitlines()[0].strip() if answer.returncode == 0 and answer.stdout.strip() else None
