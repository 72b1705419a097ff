"""Masks: which keys a query sees. `base` defines `Mask` and its combinations, `library` the masks themselves."""

from warpattn.masks.base import And, Mask, Not, Or
from warpattn.masks.library import (
    Causal,
    Chunked,
    CustomMask,
    Document,
    Full,
    Lengths,
    Materialized,
    Padding,
    Prefix,
    SlidingWindow,
)
from warpattn.masks.program import MaskProgram, Span

__all__ = [
    "And",
    "Causal",
    "Chunked",
    "CustomMask",
    "Document",
    "Full",
    "Lengths",
    "Mask",
    "MaskProgram",
    "Materialized",
    "Not",
    "Or",
    "Padding",
    "Prefix",
    "SlidingWindow",
    "Span",
]
