"""Which form the Hopper prefill takes for a ragged batch or a paged cache, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.launch import Choice
from warpattn.problem.operands import COPY_RULE

from ..prefill.config import SM90Config, choose_config, hides

PROGRAM_NUMBERS = 32  # possible query blocks that one program of order_kernel places
PAGED_REGISTERS = 32  # of the producer, what 2 x 240 or 3 x 160 leave: page numbers take their place
COPIED_KEYS = 64  # keys of a tile that is copied row by row: half the code of 128
LEAST_BOX = 8  # rows that a swizzle keeps together


@dataclass(frozen=True)
class Form:
    """Everything about lengths that the code is compiled for, and the tiles of the dense kernel."""

    tiles: SM90Config
    page_size: int  # 0: sequences lie end to end
    box: int  # rows of a box of keys; 0: they are copied row by row


@dataclass(frozen=True)
class LengthOrder:
    """How the scheduler numbers output tiles: sections of heads, longest tile of all sequences first."""

    blocks: int  # query blocks at most
    numbers: int  # places where one may begin, see pieces/order_kernel.py
    section: int  # query heads whose tiles are handed out together


def choose(problem: Problem, target: Arch) -> Choice:
    """The choice for a ragged or paged `problem`; lengths are not known, so only upper bounds follow from it."""
    mean_q = -(-problem.seq_q // problem.batch) if problem.kind == "ragged" else problem.seq_q
    tiles, why = choose_config(problem.element.name, problem.dim_qk, problem.dim_v, mean_q, hides(problem))
    box, box_why = _box(problem.page_size, tiles.block_n)
    if problem.kind == "paged":
        tiles = replace(tiles, producer_registers=PAGED_REGISTERS, block_n=tiles.block_n if box else COPIED_KEYS)
    blocks = _most_blocks(problem, tiles.block_m)
    section, section_why = _section(problem, target)
    grid = max(1, min(target.processors, blocks * problem.heads_q))
    rows = f"boxes of {box} rows" if box else "rows copied one by one"
    lines = (
        f"tile {tiles.block_m} x {tiles.block_n}, {tiles.consumers} consumer warpgroups, rings K {tiles.kv_stages} "
        f"V {tiles.kv_stages} Q {tiles.q_stages}, {rows}, {tiles.smem_bytes} bytes of shared memory",
        f"at most {blocks} query blocks of {problem.heads_q} heads, sections of {section} heads, {grid} CTAs",
    )
    order_why = "a kernel of its own sorts the query blocks by the key tiles their lengths and the mask leave them"
    order = LengthOrder(blocks, _numbers(problem, tiles.block_m), section)
    reasons = (why, box_why, section_why, order_why, COPY_RULE)
    return Choice("prefill_lengths", Form(tiles, problem.page_size, box), (grid,), lines, reasons, order=order)


def _box(page_size: int, block_n: int) -> tuple[int, str]:
    """Rows of a box of keys: what divides both a page and a key tile."""
    if page_size == 0:
        return block_n, "sequences lie end to end: a box is a whole key tile"
    box = min(page_size & -page_size, block_n)
    if box < LEAST_BOX:
        return 0, f"pages of {page_size} keys hold no box of {LEAST_BOX} rows: ordinary copies fetch them row by row"
    return box, f"pages of {page_size} keys: boxes of {box} rows divide them and the key tile"


def _most_blocks(problem: Problem, block_m: int) -> int:
    """Upper bound of the number of query blocks."""
    if problem.kind == "ragged":
        return min(problem.seq_q, (problem.seq_q + problem.batch * (block_m - 1)) // block_m)
    return problem.batch * -(-problem.seq_q // block_m)


def _numbers(problem: Problem, block_m: int) -> int:
    """Places in the batch where a query block may begin."""
    if problem.kind == "ragged":
        return problem.seq_q // block_m + problem.batch
    return problem.batch * max(1, -(-problem.seq_q // block_m))


def _section(problem: Problem, target: Arch) -> tuple[int, str]:
    """How many query heads run side by side (all of some key heads')."""
    keys = problem.seq_k * (1 if problem.kind == "ragged" else problem.batch)
    kv_bytes = 2 * max(keys, 1) * (problem.dim_qk + problem.dim_v)
    sections = min(problem.heads_kv, -(-problem.heads_kv // max(1, target.l2_keep // kv_bytes)))
    side_by_side = -(-problem.heads_kv // sections)
    why = f"{sections} even sections of {side_by_side} key heads, K and V within {target.l2_keep >> 20} MiB of L2"
    return side_by_side * (problem.heads_q // problem.heads_kv), why
