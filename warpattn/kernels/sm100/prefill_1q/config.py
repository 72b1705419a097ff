"""When a Blackwell problem gets the kernel of one query tile, and into how many parts its keys are split.

One CTA for two query tiles leaves SMs idle when there are few tiles. Half-sized tiles make twice the CTAs, and the keys
of a tile can be split over 2, 4, 8 or 16 of them; another kernel (nvidia/combine_parts.py) combines the parts.
"""

from __future__ import annotations

from dataclasses import replace

from warpattn.errors import many
from warpattn.problem import Problem
from warpattn.problem.arch import Arch
from warpattn.problem.launch import Choice

from ..config import FA4Config
from ..traits import LEAST_ROWS

SPLITS = (16, 8, 4, 2)
KEYS_PER_PART = 512  # at least, so that the combination stays small beside the parts; counted, not timed on a card


def choose_1q(problem: Problem, two: FA4Config, target: Arch) -> Choice | None:
    """The choice for a problem whose CTAs of two query tiles (config `two`) do not fill the chip; else None."""
    switches = replace(two, page_size=0).can_switch_to_1q()  # pages of any size can be loaded, see sm100/global_rows.py
    if problem.kind == "ragged" or not switches or _ctas(problem, two) >= target.processors:
        return None
    whole = two.box_rows < LEAST_ROWS or two.converts
    chunks = 1 if whole else None  # in two chunks, copied keys spilled 295 registers (head dim 128)
    one, changes = replace(two, BM=128, max_qk_stages=chunks).gluon()
    ctas = _ctas(problem, one)
    parts = parts_of_keys(ctas, problem.seq_k, target)
    pairs = many(_ctas(problem, two), "CTA")
    few = f"two query tiles a CTA would make {pairs} for {target.processors} SMs; one makes {ctas}"
    return choice_of(problem, replace(one, splitk_partitions=parts), (few, *changes))


def parts_of_keys(ctas: int, seq_k: int, target: Arch) -> int:
    """How many CTAs share the keys of each of `ctas` tiles: as many as fill the chip and have keys enough."""
    return next((p for p in SPLITS if ctas * p <= target.processors and seq_k >= KEYS_PER_PART * p), 1)


def choice_of(problem: Problem, config: FA4Config, reasons: tuple[str, ...] = ()) -> Choice:
    """The choice of a config with one query tile."""
    parts = config.splitk_partitions
    tiles, heads, batch = _grid(problem, config)
    ring = "one ring for K and V" if config.use_shared_kv else "a ring each for K and V"
    chunks = f", K in {config.num_qk_stages} chunks of columns" if config.num_qk_stages > 1 else ""

    def lines() -> tuple[str, ...]:
        return (
            f"tile 1 x {config.BM_q} x {config.BN}, {ring} of {many(config.num_kv_stages, 'slot')}{chunks}, "
            f"{config.smem_used} bytes of shared memory, {config.tmem_used} columns of tensor memory",
            f"grid {tiles * parts} x {heads} x {batch}, the keys of a tile in {many(parts, 'part')}",
        )

    shared = f"keys are shared out over {parts} CTAs a tile: {many(tiles * heads * batch, 'tile')}"
    split = (shared,) if parts > 1 else ()
    return Choice("prefill_1q", config, (tiles * parts, heads, batch), lines, (*reasons, *split), partitions=parts)


def _grid(problem: Problem, config: FA4Config) -> tuple[int, int, int]:
    """(query tiles, heads, batch)."""
    return max(1, -(-problem.longest_q // config.BM_eff)), problem.heads_q // config.tile_heads, problem.batch


def _ctas(problem: Problem, config: FA4Config) -> int:
    tiles, heads, batch = _grid(problem, config)
    return tiles * heads * batch
