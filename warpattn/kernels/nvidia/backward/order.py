"""The order in which CTAs of a backward take key tiles.

This file imports no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from warpattn.errors import many
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.launch import EARLY_AND_WAITS, Choice
from warpattn.problem.operands import COPY_RULE, is_masked

from .arguments import PADDING
from .tiles import BackwardTiles

# Size of a section in waves of all SMs, for packed sequences, whose tiles differ more: with one head at a time, 32
# documents of mean length 512 would end 10 % later.
RAGGED_WAVES = 4


@dataclass(frozen=True)
class KeyTileOrder:
    """How CTAs are numbered: section by section, in each key tile by key tile, for each tile all heads. A section has
    as many heads as run at once, so that their queries share L2 (with more heads 16 x 1 k takes 11 % longer on an
    H100). With a causal mask the longest tiles come first, so the last section ends evenly."""

    tiles: int  # key tiles of a head
    heads: int  # key heads
    section: int  # heads of a section
    at_once: int  # CTAs that run at once

    @cached_property
    def lap(self) -> int:
        """CTAs of a lap, which begin or end together: those of a section, or of equal parts of it that run at once."""
        section = self.tiles * self.section
        return -(-section // -(-section // self.at_once))

    @property
    def lap_rows(self) -> int:
        """Key tiles of each head in a lap."""
        return max(self.lap // self.section, 1)


def key_tile_choice(problem: Problem, config: BackwardTiles, why: str, target: Arch, *memory: str) -> Choice:
    """Makes the `Choice` for the gradients of a `problem` with `config` (for the reason `why`): one CTA per key tile,
    or per SM if persistent. `memory`: further lines for a plan."""
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
            f"{many(ctas, 'CTA')}: {many(tiles * heads, 'key tile')} of {config.block_n} keys, "
            f"query tiles of {config.block_m}",
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
    """Heads of a section; one where tiles have equal work or wait for later ones."""
    if config.waits_for_later or not (config.ragged or is_masked(problem)):
        return 1
    heads = problem.heads_kv * (1 if config.ragged else problem.batch)
    waves = RAGGED_WAVES if config.ragged else 1
    return max(1, min(heads, waves * target.processors // max(1, tiles)))


def padded_rows(problem: Problem) -> int:
    """Rows of a head in the kernels' own numbers. Packed sequence b begins at cu_q[b] + b * PADDING, rounded down to
    a multiple of PADDING, so that no padded lengths need to be summed."""
    if problem.kind == "ragged":
        return PADDING * (problem.seq_q // PADDING + problem.batch)
    return PADDING * -(-problem.seq_q // PADDING)
