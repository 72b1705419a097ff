"""How problems are written on the command line: shapes, masks, scores, dtypes.

--shape 2x1024x16x128         batch x sequence x heads x head_dim
--shape 1x1/4096x64/8x128     queries/keys, query heads/key heads, and head_dim/value head_dim where they differ
--mask causal,window:1024     every part must hold
--score softcap:30,alibi      applied from left to right
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import typer

from warpattn.masks import Causal, Chunked, Full, Mask, Prefix, SlidingWindow
from warpattn.problem.arch import ARCHS
from warpattn.scores import ALiBi, Score, SoftCap

T = TypeVar("T")

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
SHAPE_HELP = (
    "batch x sequence x heads x head_dim, e.g. 2x1024x16x128, or with queries/keys, heads/kv heads: 2x1/4096x16/2x128"
)
MASK_HELP = "full, causal, window:W, chunked:C, prefix:P; with commas, all must hold"
SCORE_HELP = "softcap:CAP, alibi; with commas, applied from left to right"
ARCH_HELP = " or ".join(ARCHS)
DTYPE_HELP = "fp16, bf16, fp32 or fp64"


@dataclass(frozen=True)
class Shape:
    """Sizes of one dense problem."""

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int


def shape(text: str) -> Shape:
    """The shape that `text` spells; typer.BadParameter when it spells none."""
    try:
        batch, sequence, heads, dim = text.lower().split("x")
        found = Shape(int(batch), *_pair(sequence), *_pair(heads), *_pair(dim))
    except ValueError:
        raise typer.BadParameter(f"shape {text!r}: write {SHAPE_HELP}") from None
    return found


def mask(text: str) -> Mask:
    """The mask that `text` spells."""
    kinds: dict[str, Callable[[str], Mask]] = {
        "full": _plain(Full),
        "causal": _plain(Causal),
        "window": lambda value: SlidingWindow(int(value)),
        "chunked": lambda value: Chunked(int(value)),
        "prefix": lambda value: Prefix(int(value)),
    }
    return functools.reduce(operator.and_, _parts("mask", text, kinds, MASK_HELP))


def score(text: str, heads: int) -> Score | None:
    """The score that `text` spells for `heads` query heads; None for nothing."""
    kinds: dict[str, Callable[[str], Score]] = {
        "softcap": lambda value: SoftCap(float(value)),
        "alibi": _plain(lambda: ALiBi(heads)),
    }
    return functools.reduce(operator.or_, _parts("score", text, kinds, SCORE_HELP)) if text else None


def dtype(text: str) -> torch.dtype:
    """The dtype that `text` spells."""
    if text not in DTYPES:
        raise typer.BadParameter(f"dtype {text!r}: write {DTYPE_HELP}")
    return DTYPES[text]


def half(text: str) -> torch.dtype:
    """The 16-bit dtype that `text` spells, which is what kernels take."""
    if text not in ("fp16", "bf16"):
        raise typer.BadParameter(f"dtype {text!r}: kernels take fp16 or bf16")
    return DTYPES[text]


def arch(text: str) -> str:
    """The architecture that `text` names."""
    if text not in ARCHS:
        raise typer.BadParameter(f"arch {text!r}: write {ARCH_HELP}")
    return text


def device(text: str) -> torch.device:
    """The device that `text` names; "auto" is a Hopper GPU where there is one, else the CPU."""
    if text == "auto":
        hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        return torch.device("cuda" if hopper else "cpu")
    try:
        return torch.device(text)
    except RuntimeError:
        raise typer.BadParameter(f"device {text!r}: write auto, cpu, cuda or cuda:1") from None


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    pair = int(first), int(second or first)
    if min(pair) < 1:
        raise ValueError(text)
    return pair


def _plain(make: Callable[[], T]) -> Callable[[str], T]:
    """A kind that takes no value: anything after a colon is refused."""

    def build(value: str) -> T:
        if value:
            raise ValueError(value)
        return make()

    return build


def _parts(what: str, text: str, kinds: dict[str, Callable[[str], Any]], usage: str) -> list[Any]:
    parts = []
    for part in text.split(","):
        name, _, value = part.strip().partition(":")
        try:
            parts.append(kinds[name](value))
        except (KeyError, ValueError) as error:
            reason = f" ({error})" if isinstance(error, ValueError) and value and name in kinds else ""
            raise typer.BadParameter(f"{what} {part!r}: write {usage}{reason}") from None
    return parts
