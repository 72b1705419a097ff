"""In which order the CTAs of a backward take key tiles.

Nothing in this file imports Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.launch import EARLY_AND_WAITS, Choice
from warpattn.problem.operands import COPY_RULE, is_masked

from .arguments import PADDING
from .tiles import BackwardTiles

# CTAs of a section, in waves of all SMs, where sequences are end to end: their tiles differ more (of 32 documents of
# mean 512 a list of CTAs as long as they take ends 10 % later with one head at a time).
RAGGED_WAVES = 4


@dataclass(frozen=True)
class KeyTileOrder:
    """How CTAs are numbered: the key tiles of a section's heads one after the other, of each tile all heads. As many
    heads are a section as run at once, so that CTAs share queries in L2 (with more heads side by side 16 x 1 k takes
    11 % more time on an H100). A causal mask's longest tiles are first, so the last section ends evenly."""

    tiles: int  # of a head
    heads: int  # key heads
    section: int  # heads of a section
    at_once: int  # CTAs that run at once

    @cached_property
    def lap(self) -> int:
        """Key tiles of a section, or of equal parts of it that run at once, which begin together, or end together."""
        section = self.tiles * self.section
        return -(-section // -(-section // self.at_once))


def key_tile_choice(problem: Problem, config: BackwardTiles, why: str, target: Arch, *memory: str) -> Choice:
    """The choice for the gradients of a `problem` by a configuration and the reason for it: a CTA for each key tile, or
    for each SM. `memory`: lines on the configuration beside its roles and rings."""
    if config.persistent:
        why += "; one persistent CTA on each SM takes key tiles as it gets free"
    if config.ragged:
        tiles, heads = problem.seq_k // config.block_n + problem.batch, problem.heads_kv
        order = "key tiles of the longest sequence first; the device counts them"
    else:
        tiles, heads = -(-problem.seq_k // config.block_n), problem.batch * problem.heads_kv
        order = "the key tiles of a head one after the other share its queries in L2"
    section = heads_of_section(problem, config, tiles, target)
    ctas = min(tiles * heads, target.processors) if config.persistent else tiles * heads
    if section > 1:
        order += f"; {section} heads at a time, so that long tiles of all begin first"
    copies = config.dq_copies
    sums = "dQ in fp32" if copies == 1 else f"{copies} sums of dQ in fp32"
    numbers = padded_rows(problem) * problem.heads_q * (1 if config.ragged else problem.batch)

    def lines() -> tuple[str, ...]:
        return (
            *config.topology.picture().splitlines(),
            *memory,
            f"{ctas} CTAs: {tiles * heads} key tiles of {config.block_n} keys, query tiles of {config.block_m}",
            f"workspace: {4 * numbers * (copies * problem.dim_qk + 2):,} bytes for {sums} and two numbers for each row",
        )

    if config.deterministic:
        order += "; CTAs add to a tile of dQ in a fixed order, that in which they arrive there"
        if copies > 1:
            order += f"; they share {copies} sums of each tile, as turns of one pass slower than they arrive"
    if config.mirrored:
        order += "; in turn from the first rows up, the shortest first, and from the last rows down, the longest first"
    elif config.side_by_side:
        order += "; of a query tile all heads of the group, from the last rows down and, as these end, up"
    reasons = (why, order, "the query heads of a key head are walked in one CTA: dK and dV need no second pass")
    numbered = KeyTileOrder(tiles, heads, section, target.processors)
    return Choice("backward", config, (ctas,), lines, (*reasons, EARLY_AND_WAITS, COPY_RULE), order=numbered)


def heads_of_section(problem: Problem, config: BackwardTiles, tiles: int, target: Arch) -> int:
    """Heads whose key tiles are numbered together: one where tiles have equal work, or wait for later ones."""
    if config.waits_for_later or not (config.ragged or is_masked(problem)):
        return 1
    heads = problem.heads_kv * (1 if config.ragged else problem.batch)
    waves = RAGGED_WAVES if config.ragged else 1
    return max(1, min(heads, waves * target.processors // max(1, tiles)))


def padded_rows(problem: Problem) -> int:
    """Rows of a head in the kernels' own numbers. Sequence b of those end to end begins at a multiple of PADDING, at
    (cu_q[b] + b * PADDING) rounded down, so that no lengths are added up."""
    if problem.kind == "ragged":
        return PADDING * (problem.seq_q // PADDING + problem.batch)
    return PADDING * -(-problem.seq_q // PADDING)
