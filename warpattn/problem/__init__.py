"""A call as a problem: its arguments, the rules they keep, and the frozen description that decides on a kernel."""

from warpattn.problem.beside import parts
from warpattn.problem.problem import Call, CheckedCall, Problem
from warpattn.problem.rules import is_latent, validate

__all__ = ["Call", "CheckedCall", "Problem", "is_latent", "parts", "validate"]
