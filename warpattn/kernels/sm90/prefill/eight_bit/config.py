"""The configuration of Hopper's prefill for 8-bit keys and values, and when it multiplies 8-bit queries as they are.

Nothing in this file imports Triton.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from warpattn.kernels.topology import Registers
from warpattn.problem import Problem
from warpattn.problem.element import ELEMENT_OF
from warpattn.problem.launch import Choice, PlanOptions
from warpattn.problem.operands import is_masked, sees_first_keys
from warpattn.problem.problem import NO_SCALES
from warpattn.problem.scales import EightBit, eight_bit_of
from warpattn.quantized import ROW_BLOCKS

from ...arguments import WIDENED_KEYS
from ...operand_format import OperandFormat
from ...widths import pad_dim
from ..config import ALIGNMENT, SHORT_ROWS, SMEM_LIMIT, SM90Config, choose_config, stored

PRODUCT_SCALES = (None, "tensor", "head", *ROW_BLOCKS)  # of products of 8 bits
WIDENED_SCALES = (None, "tensor", "head")  # of keys and values that are copied in 16 bits: no factor of a token
WIDENED_ROWS = 1024  # of queries that see a key, from which on copies took less time, but 1 % (bench/notes.md 236)
WIDENED_BYTES = 512 * 2**20  # of the copies at most
CONVERT_CONSUMER, CONVERT_PRODUCER = 216, 32  # registers beside a warpgroup that converts
LEAST_STORED = 16  # columns of the output


def widens(problem: Problem, options: PlanOptions) -> bool:
    """Whether 8-bit keys and values are copied in 16 bits before prefill, rather than converted in each tile: where
    enough rows of queries see each key, and copies take no more than WIDENED_BYTES. What a batch-invariant row reads
    must not depend on the other sequences."""
    if problem.q_dtype is not None or problem.rope or options.batch_invariant:
        return False
    if not {problem.scales.k, problem.scales.v} <= set(WIDENED_SCALES) or not sees_first_keys(problem):
        return False
    return _seeing_rows(problem) >= WIDENED_ROWS and widened_bytes(problem) <= WIDENED_BYTES


def _seeing_rows(problem: Problem) -> float:
    """Query rows that see a key, about, in a sequence of the mean length."""
    together = problem.ragged_queries and problem.batch > 1
    queries = problem.seq_q / problem.batch if together else problem.seq_q
    keys = problem.seq_k / problem.batch if together and problem.kind == "ragged" else problem.seq_k
    seen = 1 - queries / (2 * max(keys, queries, 1)) if is_masked(problem) else 1.0
    return queries * seen * problem.heads_q / problem.heads_kv


def widened_bytes(problem: Problem) -> int:
    """Of the copies of all keys and values that there may be."""
    keys = problem.seq_k * (1 if problem.kind == "ragged" else problem.batch)
    return 2 * keys * problem.heads_kv * (problem.dim_qk + problem.dim_v)


def in_16_bits(problem: Problem) -> Problem:
    """The problem of the copies, without scales."""
    page_size = WIDENED_KEYS if problem.page_size else 0
    return replace(problem, kv_dtype=None, scales=NO_SCALES, page_size=page_size)


def over_copies(choice: Choice, problem: Problem) -> Choice:
    """The choice of a problem in 16 bits, over copies of 8-bit keys and values with scales."""
    scaled = EightBit(ELEMENT_OF[problem.dtype], problem.scales)
    tiles = choice.config if isinstance(choice.config, SM90Config) else choice.config.tiles
    tiles = replace(tiles, operands=replace(tiles.operands, eight_bit=scaled))
    config = tiles if isinstance(choice.config, SM90Config) else replace(choice.config, tiles=tiles)
    why = "enough rows of queries see each key: keys and values are copied in 16 bits, once, before"
    return replace(
        choice, config=config, lines=partial(_with_copies, choice, problem), reasons=(*choice.reasons, why)
    )  # fmt: skip


def _with_copies(choice: Choice, problem: Problem) -> tuple[str, ...]:
    """The lines of a choice, and what the copies take."""
    most = "up to " if problem.page_size else ""
    return *choice.lines(), f"sm90.widen before it: {most}{widened_bytes(problem):,} bytes of copies in 16 bits"


def eight_bit_config(problem: Problem, seq_q: int) -> tuple[SM90Config, str]:
    """The configuration for 8-bit keys and values of sequences with about `seq_q` queries, and one sentence why."""
    return _products_config(problem) if multiplies_bytes(problem) else _converting_config(problem, seq_q)


def multiplies_bytes(problem: Problem) -> bool:
    """Whether prefill multiplies 8-bit queries as they are: values are transposed before, which pages cannot be, and
    fp32 sums leave no place for a factor of each token."""
    scaled = all(scale in PRODUCT_SCALES for scale in problem.scales)
    return problem.q_dtype == torch.float8_e4m3fn and problem.kind in ("dense", "ragged") and scaled


def _converting_config(problem: Problem, seq_q: int) -> tuple[SM90Config, str]:
    """The usual configuration with a warpgroup that converts: two consumer warpgroups have to do."""
    config, why = choose_config(ELEMENT_OF[problem.dtype], problem.dim_qk, problem.dim_v, min(seq_q, SHORT_ROWS), True)
    config = replace(
        config, operands=replace(config.operands, eight_bit=eight_bit_of(problem)), store_parts=config.v_parts,
        registers=Registers(CONVERT_CONSUMER, CONVERT_PRODUCER),
    )  # fmt: skip
    return _fitted(config), f"{why}; a warpgroup more converts tiles to 16 bits in the slots where they arrive"


def _products_config(problem: Problem) -> tuple[SM90Config, str]:
    """That of products of 8 bits. Turns cost 2 to 4 % there, but at head dim 64 with three warpgroups (H200)."""
    v = (pad_dim(problem.dim_v),)
    wide = max(pad_dim(problem.dim_qk), *v)
    three = wide <= 64 and problem.seq_q > SHORT_ROWS and not is_masked(problem)
    consumers, registers = (3, Registers(160, 32)) if three else (2, Registers(240, 24))
    kv_stages, q_stages = (4, 2) if wide <= 128 else (2, 1)
    why = "products of 8 bits: two warpgroups hold scores, weights and output"
    if three:
        why = "products of 8 bits, head dim <= 64, many queries, no mask: three warpgroups hide exponentials better"
    element, out = ELEMENT_OF[problem.kv_dtype or problem.dtype], ELEMENT_OF[problem.dtype]
    operands = OperandFormat(element, problem.dim_qk, problem.dim_v, eight_bit_of(problem), out)
    config = SM90Config(operands, consumers, 128, kv_stages, q_stages, v, registers, three)
    return _fitted(config), why


def _fitted(config: SM90Config) -> SM90Config:
    """The config with as few columns of the output stored at once as it takes: scales need memory, too."""
    config = stored(config)
    while config.smem_bytes + ALIGNMENT > SMEM_LIMIT and config.store_parts[0] > LEAST_STORED:
        config = replace(config, store_parts=(config.store_parts[0] // 2,))
    return config
