"""Parses problems as written on the command line: shapes, masks, scores, dtypes.

--shape 2x1024x16x128         batch x sequence x heads x head_dim
--shape 1x1/4096x64/8x128     queries/keys, query heads/key heads, and head_dim/value head_dim where they differ
--mask causal,window:1024     every part must hold
--score softcap:30,alibi      applied from left to right
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from warpattn.errors import AttentionError
from warpattn.masks import Causal, Chunked, Full, Mask, Prefix, SlidingWindow
from warpattn.problem.arch import TARGETS, known
from warpattn.problem.rules import MAX_SIZE
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
MASK = "causal"  # the default
SEED_HELP = "Seed of the random tensors, 0 .. 2**63 - 1"
MAX_SEED = 2**63 - 1
MAX_ELEMENTS = 2**60  # of a tensor; its bytes must stay below 2**63
MASK_HELP = "full, causal, window:W, chunked:C, prefix:P; with commas, all must hold"
SCORE_HELP = "softcap:CAP, alibi; with commas, applied from left to right"
ARCH_HELP = " or ".join((", ".join([*TARGETS][:-1]), [*TARGETS][-1]))
STORED = {
    "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz, "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip
STORED_HELP = "fp8 (e4m3), fp8_e4m3 or fp8_e5m2; with fnuz at the end as gfx942 has them"
SCALES = {"none": None, "tensor": "tensor", "head": "head", "token": "token", "64": 64, "128": 128}
SCALES_HELP = "tensor, head, token, 64 or 128 (columns), or none"
OPERANDS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
OPERAND_HELP = "fp16 or bf16, or fp8 for q, k and v in e4m3"
DTYPE_HELP = "fp16, bf16, fp32 or fp64"
RUN_DTYPE_HELP = "fp16, bf16, fp32, fp64 or fp8"
BACKWARD_HELP = "The kernels that compute the gradients of q, k and v, instead of the forward's"


# Sizes of a shape as users know them.
NAMES = {
    "batch": "batch", "seq_q": "the number of queries", "seq_k": "the number of keys",
    "heads_q": "the number of query heads", "heads_kv": "the number of key heads", "dim_qk": "head_dim",
    "dim_v": "the head_dim of values",
}  # fmt: skip


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

    def __str__(self) -> str:
        """The shape as --shape takes it, with every size."""
        return f"{self.batch}x{self.seq_q}/{self.seq_k}x{self.heads_q}/{self.heads_kv}x{self.dim_qk}/{self.dim_v}"

    @property
    def tensors(self) -> tuple[tuple[int, int, int, int], ...]:
        """Shapes of q, k, v and out: (batch, seq, heads, head_dim)."""
        q, k = (self.batch, self.seq_q, self.heads_q), (self.batch, self.seq_k, self.heads_kv)
        return ((*q, self.dim_qk), (*k, self.dim_qk), (*k, self.dim_v), (*q, self.dim_v))


def shape(text: str) -> Shape:
    """Parse a shape; raises AttentionError if `text` is none, or one that no tensor can have."""
    try:
        batch, sequence, heads, dim = text.lower().split("x")
        found = Shape(int(batch), *_pair(sequence), *_pair(heads), *_pair(dim))
    except ValueError:
        raise AttentionError(f"shape is {text!r}; write {SHAPE_HELP}") from None
    for name, size in vars(found).items():
        if not 1 <= size <= MAX_SIZE:
            raise AttentionError(f"shape is {text!r}: {NAMES[name]} is {size}; it must be 1 .. {MAX_SIZE}")
    largest = max(math.prod(sizes) for sizes in found.tensors)
    if largest > MAX_ELEMENTS:
        raise AttentionError(f"shape is {text!r}: a tensor of {largest} elements; it may have at most {MAX_ELEMENTS}")
    return found


def seed(number: int) -> int:
    """Return the seed; raises AttentionError if no generator takes it."""
    if not 0 <= number <= MAX_SEED:
        raise AttentionError(f"seed is {number}; it must be 0 .. {MAX_SEED}")
    return number


def mask(text: str) -> Mask:
    """Parse a mask."""
    kinds: dict[str, Callable[[str], Mask]] = {
        "full": _plain(Full),
        "causal": _plain(Causal),
        "window": _of_number(SlidingWindow, int),
        "chunked": _of_number(Chunked, int),
        "prefix": _of_number(Prefix, int),
    }
    return functools.reduce(operator.and_, _parts("mask", text, kinds, MASK_HELP))


def default_note(text: str) -> str:
    """Return a note to show with a mask, so that the default is not taken for no mask."""
    return " (causal is the default; --mask full for none)" if text == MASK else ""


def score(text: str, heads: int) -> Score | None:
    """Parse a score for `heads` query heads; None for an empty text."""
    kinds: dict[str, Callable[[str], Score]] = {
        "softcap": _of_number(SoftCap, float),
        "alibi": _plain(lambda: ALiBi(heads)),
    }
    return functools.reduce(operator.or_, _parts("score", text, kinds, SCORE_HELP)) if text else None


def dtype(text: str, known: str = DTYPE_HELP) -> torch.dtype:
    """Parse a dtype; `known` says what to write."""
    if text not in DTYPES:
        raise AttentionError(f"dtype is {text!r}; write {known}")
    return DTYPES[text]


def operand(text: str) -> torch.dtype:
    """Parse a dtype of operands that kernels take."""
    if text not in OPERANDS:
        raise AttentionError(f"dtype is {text!r}; kernels take {OPERAND_HELP}")
    return OPERANDS[text]


def stored(text: str) -> torch.dtype | None:
    """Parse a dtype of keys and values; None for an empty text: that of the queries."""
    if text and text not in STORED:
        raise AttentionError(f"kv-dtype is {text!r}; write {STORED_HELP}")
    return STORED[text] if text else None


def scales(text: str) -> str | int | None:
    """Parse the granularity of a cache's scales, see `SCALES_HELP`."""
    if text not in SCALES:
        raise AttentionError(f"kv-scales is {text!r}; write {SCALES_HELP}")
    return SCALES[text]


def arch(text: str) -> str:
    """Parse the name of an architecture."""
    return known(text)


def processes(number: int) -> int | None:
    """Return a number of processes, None for 0, which leaves it to the computation."""
    if number < 0:
        raise AttentionError(f"processes is {number}; it must be 0 or more")
    return number or None


def device(text: str) -> torch.device:
    """Parse a device; "auto" is a Hopper GPU if there is one, else the CPU."""
    if text == "auto":
        hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        return torch.device("cuda" if hopper else "cpu")
    try:
        found = torch.device(text)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise AttentionError(f"device is {text!r}; write auto, cpu, cuda or cuda:1")
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= cards:
        raise AttentionError(f"device is {text!r}; torch sees {cards} CUDA devices here, write cpu or auto")
    return found


def _pair(text: str) -> tuple[int, int]:
    first, slash, second = text.partition("/")
    return int(first), int(second if slash else first)


def _plain(make: Callable[[], T]) -> Callable[[str], T]:
    """Make a parser for a name without a value: anything after a colon is refused."""

    def build(value: str) -> T:
        if value:
            raise ValueError("it takes no value")
        return make()

    return build


def _of_number(make: Callable[[Any], T], kind: type[int] | type[float]) -> Callable[[str], T]:
    """A kind that takes a number."""

    def build(value: str) -> T:
        try:
            number = kind(value)
        except ValueError:
            raise ValueError(f"{value!r} is no {'integer' if kind is int else 'number'}") from None
        return make(number)

    return build


def _parts(what: str, text: str, kinds: dict[str, Callable[[str], Any]], usage: str) -> list[Any]:
    parts = []
    for part in text.split(","):
        name, colon, value = part.strip().partition(":")
        try:
            if colon and not value:
                raise KeyError(part)
            parts.append(kinds[name](value))
        except (KeyError, ValueError) as error:
            reason = f" ({error})" if isinstance(error, ValueError) and value and name in kinds else ""
            raise AttentionError(f"{what} is {part or text!r}; write {usage}{reason}") from None
    return parts
