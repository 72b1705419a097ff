"""The names of backends, the backend of a device, and the limits of each backend's kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules
from warpattn.inputs import kind_of
from warpattn.problem.arch import ARCHS, RUNS, TARGETS, Arch
from warpattn.problem.element import BF16, FP16
from warpattn.quantized import ROW_BLOCKS

# The device that the kernels of an architecture need.
NEEDS = {
    "sm90": "CUDA capability 9.0",
    "sm100": "CUDA capability 10.0 or 10.3",
    "gfx942": "an AMD gfx942",
    "gfx950": "an AMD gfx950",
}
PER = (None, "tensor", "head", "token", 64, 128, *ROW_BLOCKS)  # granularities of scales
KERNEL_DTYPES = (FP16.dtype, BF16.dtype)
USE_REFERENCE = 'use backend="reference"'


class HeadDims(NamedTuple):
    """Head dims: of queries and keys, and of values."""

    qk: int
    v: int


@dataclass(frozen=True)
class BackwardLimits:
    """Which of the forward's problems the backward kernels take."""

    kinds: tuple[str, ...]
    max_dim: int
    deterministic: bool = False  # whether they can have the same bits in every run
    captured: bool = True  # a kernel computes gradients of a score's captured tensors; else torch operations


@dataclass(frozen=True)
class EightBitLimits:
    """Which 8-bit keys and values the kernels take, and which queries with them."""

    dtypes: tuple[torch.dtype, ...]
    kinds: tuple[str, ...]  # of sequences
    scales: tuple[str | int | None, ...]  # granularities, see `quantized.granularity`
    columns: int  # head dims are multiples of it
    rows: int  # page sizes are multiples of it
    fp16_tokens: int  # most queries of a sequence where fp16 cannot hold weights or operands times their scales
    queries: tuple[torch.dtype, ...] = ()  # dtypes of 8-bit queries; (): none
    product_scales: tuple[str | int | None, ...] = ()  # granularities with 8-bit queries; (): those of `scales`
    fp16_keys: bool = True  # whether fp16 queries may have keys with scales per token or block
    max_dim: int = 256
    product_dim: int = 256  # the largest head dim with 8-bit queries
    latents: tuple[str | int | None, ...] = ()  # granularities of scales of 8-bit latents with a rotary part

    def scales_of(self, operand: str, narrow: bool) -> tuple[str | int | None, ...]:
        """Return the granularities that the scale of "k", "v" or "q" may have; `narrow`: with 8-bit queries. Queries
        have no scales per block of columns, values none per block of rows."""
        scales = self.product_scales if narrow and self.product_scales else self.scales
        if operand == "q":
            return tuple(per for per in scales if not isinstance(per, int))
        return tuple(per for per in scales if operand == "k" or per not in ROW_BLOCKS)


@dataclass(frozen=True)
class Limits:
    """Limits of the kernels of one architecture. Head dims are padded to the next multiple of 8."""

    kinds: tuple[str, ...]  # of sequences
    max_dim: int
    backward: BackwardLimits
    latent: bool = False  # whether decode takes `LATENT` head dims, too
    eight_bit: EightBitLimits | None = None  # None: takes no 8-bit keys and values


LATENT = HeadDims(576, 512)  # in absorbed latent attention (MLA)
LATENT_TOKENS = 16  # most query tokens of a sequence with these head dims
EVERY_KIND = ("dense", "ragged", "paged", "paged-ragged")
BACKWARD_SM90 = BackwardLimits(("dense", "ragged"), 256, deterministic=True)
BACKWARD_SM100 = BackwardLimits(("dense", "ragged"), 256, deterministic=True)
BACKWARD_CDNA = BackwardLimits(("dense", "ragged"), 128, deterministic=True, captured=False)
EIGHT_BIT_SM90 = EightBitLimits(
    (torch.float8_e4m3fn, torch.float8_e5m2), EVERY_KIND, PER,
    columns=16, rows=8, fp16_tokens=16, queries=(torch.float8_e4m3fn, torch.float8_e5m2),
    latents=(None, "tensor", "token", 128),
)  # fmt: skip
EIGHT_BIT_GFX942 = EightBitLimits(
    (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), EVERY_KIND, PER, 16, 1, 0,
    latents=(None, "tensor", "token", 128),
)  # fmt: skip
EIGHT_BIT_GFX950 = replace(EIGHT_BIT_GFX942, dtypes=(torch.float8_e4m3fn, torch.float8_e5m2))
EIGHT_BIT_SM100 = EightBitLimits(
    (torch.float8_e4m3fn, torch.float8_e5m2), EVERY_KIND, PER, 16, 8, 0,
    queries=(torch.float8_e4m3fn, torch.float8_e5m2), product_scales=(None, "tensor", "head", *ROW_BLOCKS),
    fp16_keys=False, product_dim=128, latents=(None, "tensor", "token", 128),
)  # fmt: skip
LIMITS = {
    "sm90": Limits(EVERY_KIND, 512, BACKWARD_SM90, True, EIGHT_BIT_SM90),
    "sm100": Limits(EVERY_KIND, 512, BACKWARD_SM100, True, EIGHT_BIT_SM100),
    "gfx942": Limits(EVERY_KIND, 256, BACKWARD_CDNA, True, EIGHT_BIT_GFX942),
    "gfx950": Limits(EVERY_KIND, 256, BACKWARD_CDNA, True, EIGHT_BIT_GFX950),
}
LIMITS |= {chip: LIMITS[arch] for chip, arch in RUNS.items()}
BACKENDS = ("auto", "reference", *NEEDS, *(f"simulate:{arch}" for arch in LIMITS))


@dataclass(frozen=True)
class Backend:
    """Where and how a call runs, for `backend=` where a name is not enough.

    deterministic: True gives gradients the same bits in every run, which costs time. None follows
    `torch.use_deterministic_algorithms`. Outputs always have the same bits.
    """

    name: str = "auto"
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        if not (self.deterministic is None or isinstance(self.deterministic, bool)):
            raise AttentionError(f"deterministic is {kind_of(self.deterministic)}; it must be None, True or False")


@dataclass(frozen=True)
class Chip:
    """A device: the architecture whose kernels it runs, if any; its name in errors; its name in `TARGETS`."""

    arch: str | None
    words: str
    target: str | None = None


def chip_of(device: torch.device) -> Chip:
    """Return the chip of a device. ROCm also calls its devices "cuda", and reports capability 9.0 for gfx90a."""
    if device.type != "cuda":
        return Chip(None, "")
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return Chip(name, name, name) if name in NEEDS else Chip(None, name)
    major, minor = torch.cuda.get_device_capability(device)
    words, target = f"CUDA capability {major}.{minor}", f"sm{major}{minor}"
    return Chip(RUNS.get(target, target), words, target) if target in TARGETS else Chip(None, words)


def card_target(device: torch.device, arch: str) -> Arch | None:
    """Return the numbers of a card that has fewer or more SMs than `ARCHS` says; None of any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    usual, number = ARCHS[RUNS.get(arch, arch)], torch.cuda.get_device_properties(device).multi_processor_count
    return replace(usual, processors=number) if number != usual.processors else None


def target_here(arch: str) -> Arch:
    """Return the numbers that plans for `arch` are made with here: those of the current card if it has that one."""
    usual = ARCHS[RUNS.get(arch, arch)]
    if not torch.cuda.is_available():
        return usual
    device = torch.device("cuda", torch.cuda.current_device())
    return (card_target(device, arch) if chip_of(device).target == arch else None) or usual


def choose_backend(rules: Rules, name: str, x: object, called: str = "q") -> str | None:
    """Return the backend for a tensor `x`, named `called` in errors; None for an unknown name or device."""
    device = x.device if isinstance(x, Tensor) else None
    if not isinstance(name, str) or name not in BACKENDS:
        listed = ", ".join(f'"{x}"' for x in BACKENDS)
        rules.add(f"backend is {kind_of(name)}", f"backend must be one of {listed}")
        return None
    if name == "reference" or device is None or device.type == "meta":
        return "reference"
    if name.startswith("simulate:"):
        if device.type != "cpu":
            rules.add(f"{called} is on {device}", f'backend="{name}" runs kernels on CPU tensors')
        return name
    if name == "auto" and device.type == "cpu":
        return "reference"
    chip = chip_of(device)
    if chip.arch is not None and name in ("auto", chip.arch):
        return chip.arch
    what = f"{called} is on {device}, {chip.words}" if chip.words else f"{called} is on {device}"
    if name != "auto":
        rules.add(what, f'backend="{name}" needs {NEEDS[name]}')
        return name
    every = ", ".join(f'{needs} ("{arch}")' for arch, needs in NEEDS.items())
    rule = f'backend="auto" supports {every} and the CPU ("reference"); elsewhere {USE_REFERENCE}'
    rules.add(what, rule)
    return None
