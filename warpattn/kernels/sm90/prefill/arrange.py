"""From a configuration of dense prefill on Hopper to the choice of a problem: its grid and the order of its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.element import ELEMENT_OF
from warpattn.problem.launch import Choice
from warpattn.problem.operands import COPY_RULE

from .config import SM90Config, is_masked


@dataclass(frozen=True)
class TileOrder:
    """How the scheduler numbers output tiles: sections of heads, each section longest tile first."""

    m_tiles: int  # query tiles per head
    heads: int  # query heads over the whole batch
    section: int  # heads whose tiles the scheduler hands out together


def arrange(problem: Problem, target: Arch, config: SM90Config, why: str, parts: int = 1) -> Choice:
    """The choice of one configuration for a dense `problem`, with the keys of a tile in `parts` parts."""
    heads = problem.batch * problem.heads_q
    m_tiles = -(-problem.seq_q // config.tokens)
    section, section_why = _section(problem, target, m_tiles, config.packed)
    order = TileOrder(m_tiles, heads, section)
    tiles = heads // config.packed * m_tiles * parts
    grid = min(target.processors * config.ctas, tiles)
    moved = problem.batch * problem.seq_k * problem.heads_kv * config.dim_v
    packed = f" of {config.packed} heads" if config.packed > 1 else ""

    def lines() -> tuple[str, ...]:
        return (
            f"tile {config.block_m}{packed} x {config.block_n}, {config.consumers} consumer warpgroups, rings K "
            f"{config.kv_stages} V {config.kv_stages} Q {config.q_stages}, {config.smem_bytes} bytes of shared memory",
            f"{tiles} tiles ({m_tiles} a head), sections of {section} heads, {grid} CTAs",
            *([f"sm90.values_across before it: {moved:,} bytes of values, transposed"] if config.products else []),
        )

    cta_why = f"one persistent CTA on each of {target.processors} SMs takes tiles as it gets free"
    reasons = (why, section_why, cta_why, COPY_RULE)
    return Choice("prefill", config, (grid,), lines, reasons, partitions=parts, order=order)


def _section(problem: Problem, target: Arch, m_tiles: int, packed: int) -> tuple[int, str]:
    """How many query heads run side by side (all of some key heads')."""
    group = problem.heads_q // problem.heads_kv
    kv_heads = problem.batch * problem.heads_kv
    if not is_masked(problem):
        side_by_side = -(-target.processors // max(1, m_tiles * group // packed))
        why = f"tiles are equally long: {side_by_side} key heads at a time fill {target.processors} SMs"
        return min(kv_heads, side_by_side) * group, why
    element = ELEMENT_OF[problem.kv_dtype or problem.dtype]
    kv_bytes = element.bytes * max(problem.seq_k, 1) * (problem.dim_qk + problem.dim_v)
    sections = -(-kv_heads // max(1, target.l2_keep // kv_bytes))
    side_by_side = -(-kv_heads // sections)
    why = (
        f"tiles differ in length: {sections} even sections of {side_by_side} key heads, K and V within "
        f"{target.l2_keep >> 20} MiB of L2, each section longest tile first"
    )
    return side_by_side * group, why
