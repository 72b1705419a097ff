"""What Triton compiles to merge states."""

from __future__ import annotations

from triton.experimental.gluon import GluonASTSource

from warpattn.kernels.cache.config import Rows
from warpattn.problem.arch import TARGETS

from .config import MergeConfig, MergeShape, State
from .kernel import merge_kernel

ALIGNED = [["tt.divisibility", 16]]


def merge_source(element: str, config: MergeConfig, arch: str) -> GluonASTSource:
    """The kernel for outputs of an element's name, for an architecture."""
    state = State(Rows(f"*{element}", "i64", "i64", "i64"), Rows("*fp32", "i64", "i64", "i64"))
    constants = {"config": config, "lanes": TARGETS[arch].lanes}
    signature = {
        "states": (state,) * config.states, "merged": state, "limit": "*i32", "shape": MergeShape(*["i32"] * 3),
        **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    hints = {}
    if config.run > 1:
        pointers = [(0, i, 0, 0) for i in range(config.states)] + [(1, 0, 0)]
        hints = {at: ALIGNED for at in pointers}
    return GluonASTSource(merge_kernel, signature, constants, hints)
