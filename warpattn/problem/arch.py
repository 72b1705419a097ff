"""Each GPU architecture: the numbers that plans are made with, and its Triton target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from warpattn.errors import AttentionError


@dataclass(frozen=True)
class Arch:
    """One GPU architecture. `l2_keep` is how much of L2 a run of heads may fill with K and V (half of the cache)."""

    name: str
    processors: int  # SMs or CUs
    smem: int  # bytes one block can have
    l2_keep: int  # bytes
    source: str


class Target(NamedTuple):
    """Triton's name of a chip."""

    backend: str
    chip: int | str
    lanes: int  # of a warp


TARGETS = {
    "sm90": Target("cuda", 90, 32),
    "sm100": Target("cuda", 100, 32),
    "sm103": Target("cuda", 103, 32),
    "gfx942": Target("hip", "gfx942", 64),
    "gfx950": Target("hip", "gfx950", 64),
}
# Chips that run another chip's kernels, compiled for themselves: a B300 runs those of a B200.
RUNS = {"sm103": "sm100"}
# Chips that users may name but no kernel is written for: other tensor cores, less shared memory.
WITHOUT_KERNELS = ("sm80", "sm86", "sm89", "sm120", "sm121")
ARCHS = {
    "sm90": Arch("sm90", 132, 232_448, 32 * 2**20, "H200: 132 SMs, 60 MB L2 as torch reports them; 227 KiB a block"),
    "sm100": Arch("sm100", 148, 232_448, 63 * 2**20, "B200 by its data sheet: 148 SMs, 126 MB L2; 227 KiB a block"),
    "gfx942": Arch("gfx942", 304, 65_536, 2 * 2**20, "MI300X by its data sheet: 304 CUs, 64 KiB LDS, 4 MB L2 per XCD"),
    "gfx950": Arch("gfx950", 256, 163_840, 2 * 2**20, "MI355X by its data sheet: 256 CUs, 160 KiB LDS, 4 MB L2 a XCD"),
}


def known(arch: object) -> str:
    """Return `arch` if it is a name in `TARGETS`; raises AttentionError for another one."""
    if isinstance(arch, str) and arch in TARGETS:
        return arch
    listed = ", ".join(TARGETS)
    if isinstance(arch, str) and arch in WITHOUT_KERNELS:
        rule = f'which has no kernels, only backend="reference"; there are some for {listed}'
        raise AttentionError(f"arch is {arch}, {rule}")
    raise AttentionError(f"arch is {arch!r}; it must be one of {listed}")


def triton_target(name: str) -> Any:
    """Return the `GPUTarget` of a name in `TARGETS`; imports Triton."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(*TARGETS[name])


def compile_options(warps: int = 4, **more: int) -> dict[str, Any]:
    """Return options of `triton.compile` for a kernel of `warps` warps, with `more` added."""
    return {"num_warps": warps, "enable_fp_fusion": True} | more
