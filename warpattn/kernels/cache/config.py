"""What the append kernel is compiled for."""

from dataclasses import dataclass

HEADS = 8  # of a program


@dataclass(frozen=True)
class Rotation:
    """How keys are rotated: the first `dim` elements, pairs next to each other or half a rotation apart."""

    dim: int
    interleaved: bool
