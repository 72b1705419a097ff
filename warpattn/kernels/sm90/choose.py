"""Which Hopper kernel a dense problem gets, in which order its tiles go, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from warpattn.operands import COPY_RULE
from warpattn.problem import Problem
from warpattn.step import Choice
from warpattn.target import Arch

from .config import SM90Config, choose_config

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class TileOrder:
    """How the scheduler numbers output tiles: sections of heads, each section longest tile first."""

    m_tiles: int  # query tiles per head
    heads: int  # query heads over the whole batch
    section: int  # heads whose tiles are handed out together


def choose(problem: Problem, target: Arch) -> Choice:
    """The choice for a dense `problem`. Source: bench/notes.md for the measured ones."""
    config, why = choose_config(DTYPES[problem.dtype], problem.dim_qk, problem.dim_v, problem.seq_q, hides(problem))
    return arrange(problem, target, config, why)


def arrange(problem: Problem, target: Arch, config: SM90Config, why: str) -> Choice:
    """The choice of one configuration for a dense `problem`."""
    heads = problem.batch * problem.heads_q
    m_tiles = -(-problem.seq_q // config.block_m)
    section, section_why = _section(problem, target, m_tiles)
    order = TileOrder(m_tiles, heads, section)
    grid = min(target.processors, heads * m_tiles)
    lines = (
        f"tile {config.block_m} x {config.block_n}, {config.consumers} consumer warpgroups, rings K {config.kv_stages} "
        f"V {config.kv_stages} Q {config.q_stages}, {config.smem_bytes} bytes of shared memory",
        f"{heads * m_tiles} tiles ({m_tiles} a head), sections of {section} heads, {grid} CTAs",
    )
    cta_why = f"one persistent CTA on each of {target.processors} SMs takes tiles as it gets free"
    return Choice("prefill", config, (grid,), lines, (why, section_why, cta_why, COPY_RULE), order=order)


def hides(problem: Problem) -> bool:
    """Whether the mask may hide something; see `Program.key` for what is read here."""
    code, (keep, *_), _ = cast("tuple[tuple, tuple, tuple]", problem.mask)
    return code[keep] != ("const", "bool", "True")


def _section(problem: Problem, target: Arch, m_tiles: int) -> tuple[int, str]:
    """How many query heads run side by side (all of some key heads')."""
    group = problem.heads_q // problem.heads_kv
    kv_heads = problem.batch * problem.heads_kv
    if not hides(problem):
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
