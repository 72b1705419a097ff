"""A call's arguments, the rules that check them, and the frozen `Problem` that decides which kernel runs."""

from warpattn.problem.beside import parts
from warpattn.problem.problem import Call, CheckedCall, Problem
from warpattn.problem.rules import is_latent, validate

__all__ = ["Call", "CheckedCall", "Problem", "is_latent", "parts", "validate"]
