"""The config of latent attention on Blackwell, and into how many parts its keys are split; pure host code."""

from __future__ import annotations

from dataclasses import replace

import torch

from warpattn.operands import COPY_RULE
from warpattn.problem import Problem
from warpattn.step import ORDINARY, Choice, Terms
from warpattn.target import Arch

from .mha_1q_choose import KEYS_PER_PART, SPLITS
from .mla_config import LatentConfig

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
INVARIANT = "one part, so that a sequence's sums are in the same order whatever else is in the batch"


def choose_latent(problem: Problem, target: Arch, terms: Terms = ORDINARY) -> Choice:
    """The choice for latent attention of a few tokens over dense or paged keys."""
    config = LatentConfig(_DTYPES[problem.dtype], problem.dim_qk, problem.dim_v, problem.page_size)
    tiles = -(-problem.seq_q * problem.heads_q // problem.heads_kv // config.BM)
    ctas = tiles * problem.heads_kv * problem.batch
    fits = (p for p in SPLITS if ctas * p <= target.processors and problem.seq_k >= KEYS_PER_PART * p)
    parts = 1 if terms.batch_invariant else next(fits, 1)
    config = replace(config, splitk_partitions=parts)
    lines = (
        f"tile {config.BM} x {config.BN}, ring of {config.stages} slots, {config.smem_used} bytes of shared memory, "
        f"{config.tmem_used} columns of tensor memory",
        f"grid {tiles * parts} x {problem.heads_kv} x {problem.batch}, the keys of a tile in {parts} parts",
    )
    once = "64 rows, of 16 lanes in 32: the output's 512 columns take half of tensor memory, and scores have room"
    split = INVARIANT if terms.batch_invariant else f"{ctas} tiles on {target.processors} SMs, {parts} CTAs for each"
    grid = (tiles * parts, problem.heads_kv, problem.batch)
    return Choice("mla", config, grid, lines, (once, split, COPY_RULE), partitions=parts)
