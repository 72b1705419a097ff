"""A call as a problem: its arguments, the rules they keep, and the frozen description that decides on a kernel."""

from warpattn.problem.problem import Call, Problem, Ready, is_latent
from warpattn.problem.rules import examine, parts

__all__ = ["Call", "Problem", "Ready", "examine", "is_latent", "parts"]
