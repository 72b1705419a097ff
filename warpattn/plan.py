"""From a problem to a launch: which kernel, which config, how many CTAs, and why.

`plan` is pure: same problem, same plan, no tensors, no device, no Triton. `print(plan(...))` shows all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from warpattn.kernels.sm90.config import SM90Config, choose_config
from warpattn.problem import Problem
from warpattn.target import ARCHS, Arch

__all__ = ["COPY_RULE", "Plan", "plan"]

# TMA reads and writes tensors in place when it can address them; `launch` holds each tensor against this.
COPY_RULE = (
    "q, k, v and out stay where they are if their last stride is 1, the others are multiples of 8 elements above 0, "
    "and they start at a multiple of 16 bytes; a tensor that does not is copied once"
)
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Plan:
    """A decision about one problem on one architecture."""

    problem: Problem
    arch: str
    kernel: str
    config: SM90Config
    m_tiles: int  # query tiles per head
    section: int  # heads whose tiles are handed out together
    grid: int  # CTAs
    reasons: tuple[str, ...]

    @property
    def heads(self) -> int:
        """Query heads over the whole batch."""
        return self.problem.batch * self.problem.heads_q

    def __str__(self) -> str:
        p, c = self.problem, self.config
        lines = [
            f"{self.kernel} on {self.arch}: batch {p.batch}, seq {p.seq_q} x {p.seq_k}, "
            f"heads {p.heads_q}/{p.heads_kv}, head dim {p.dim_qk}/{p.dim_v}, {c.dtype}",
            f"  tile {c.block_m} x {c.block_n}, {c.consumers} consumer warpgroups, "
            f"rings K {c.kv_stages} V {c.kv_stages} Q {c.q_stages}, {c.smem_bytes} bytes of shared memory",
            f"  {self.heads * self.m_tiles} tiles ({self.m_tiles} a head), sections of {self.section} heads, "
            f"{self.grid} CTAs",
            *(f"  because {reason}" for reason in self.reasons),
        ]
        return "\n".join(lines)


def plan(problem: Problem, arch: str = "sm90") -> Plan:
    """The plan of a dense `problem` on `arch` ("sm90"). Source: bench/notes.md for the measured choices."""
    target = ARCHS[arch]
    config, why = choose_config(_DTYPES[problem.dtype], problem.dim_qk, problem.dim_v, problem.seq_q, _hides(problem))
    m_tiles = -(-problem.seq_q // config.block_m)
    heads = problem.batch * problem.heads_q
    section, section_why = _section(problem, target, m_tiles)
    grid = min(target.processors, heads * m_tiles)
    cta_why = f"one persistent CTA on each of {target.processors} SMs takes tiles as it gets free"
    reasons = (why, section_why, cta_why, COPY_RULE)
    return Plan(problem, arch, f"{arch}.prefill", config, m_tiles, section, grid, reasons)


def _hides(problem: Problem) -> bool:
    """Whether the mask may hide something; see `Program.key` for what is read here."""
    code, (keep, *_), _ = cast("tuple[tuple, tuple, tuple]", problem.mask)
    return code[keep] != ("const", "bool", "True")


def _section(problem: Problem, target: Arch, m_tiles: int) -> tuple[int, str]:
    """How many query heads run side by side (all of some key heads')."""
    group = problem.heads_q // problem.heads_kv
    kv_heads = problem.batch * problem.heads_kv
    if not _hides(problem):
        side_by_side = -(-target.processors // max(1, m_tiles * group))
        why = f"tiles are equally long: {side_by_side} key heads at a time fill {target.processors} SMs"
        return min(kv_heads, side_by_side) * group, why
    kv_bytes = 2 * max(problem.seq_k, 1) * (problem.dim_qk + problem.dim_v)
    sections = -(-kv_heads // max(1, target.l2_keep // kv_bytes))
    side_by_side = -(-kv_heads // sections)
    why = (
        f"tiles differ in length: {sections} even sections of {side_by_side} key heads, K and V within "
        f"{target.l2_keep >> 20} MiB of L2, each section longest tile first"
    )
    return side_by_side * group, why
