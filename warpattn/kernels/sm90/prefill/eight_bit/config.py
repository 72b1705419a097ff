"""The configuration of Hopper's prefill for 8-bit keys and values, and when it multiplies 8-bit queries as they are.

This file imports no Triton.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from warpattn.kernels.topology import Registers
from warpattn.problem import Problem
from warpattn.problem.element import ELEMENT_OF
from warpattn.problem.operands import is_masked, sees_first_keys
from warpattn.problem.scales import eight_bit_of
from warpattn.quantized import ROW_BLOCKS

from ...operand_format import OperandFormat
from ..config import ALIGNMENT, SHORT_ROWS, SMEM_LIMIT, SM90Config, choose_config, fit_output, pad_dim

PRODUCT_SCALES = (None, "tensor", "head", *ROW_BLOCKS)  # kinds of scales that 8-bit products can have
CONVERT_CONSUMER, CONVERT_PRODUCER = 216, 32  # registers a thread in kernels with a converting warpgroup
MASKED_ROWS = 8192  # from so many queries on, 192-row tiles fit a causal triangle: 1.06 x at 8k, 0.99 at 4k (H200)
LEAST_STORED = 16  # least columns of the output stored at once


def eight_bit_config(problem: Problem, seq_q: int) -> tuple[SM90Config, str]:
    """The configuration for 8-bit keys and values of sequences with about `seq_q` queries, and one sentence why."""
    return _products_config(problem, seq_q) if multiplies_bytes(problem) else _converting_config(problem, seq_q)


def multiplies_bytes(problem: Problem) -> bool:
    """Whether wgmma multiplies 8-bit queries and keys as they are. That needs values transposed by a launch before,
    which pages cannot be, and no scales of single tokens, which 8-bit operands cannot include."""
    scaled = all(scale in PRODUCT_SCALES for scale in problem.scales)
    return problem.q_dtype == torch.float8_e4m3fn and problem.kind in ("dense", "ragged") and scaled


def _converting_config(problem: Problem, seq_q: int) -> tuple[SM90Config, str]:
    """The usual configuration plus a converting warpgroup, which leaves room for only two consumer warpgroups."""
    config, why = choose_config(ELEMENT_OF[problem.dtype], problem.dim_qk, problem.dim_v, min(seq_q, SHORT_ROWS), True)
    config = replace(
        config, operands=replace(config.operands, eight_bit=eight_bit_of(problem), exact_values=False),
        registers=Registers(CONVERT_CONSUMER, CONVERT_PRODUCER), take_turns=config.wide < 256,
    )  # fmt: skip
    config = replace(config, store_parts=config.v_parts)
    return _fitted(config), f"{why}; a warpgroup more converts tiles to 16 bits in the slots where they arrive"


def _products_config(problem: Problem, seq_q: int) -> tuple[SM90Config, str]:
    """The configuration for 8-bit products. Turns cost 2 % in short rows, and gain 3 % in long ones (H200)."""
    v = (pad_dim(problem.dim_v),)
    wide = max(pad_dim(problem.dim_qk), *v)
    many = seq_q >= MASKED_ROWS and sees_first_keys(problem) if is_masked(problem) else seq_q > SHORT_ROWS
    three = wide <= 64 and many
    consumers, registers = (3, Registers(160, 32)) if three else (2, Registers(240, 24))
    kv_stages, q_stages = (4, 2) if wide <= 128 else (2, 1)
    why = "products of 8 bits: two warpgroups hold scores, weights and output"
    if three:
        why = "products of 8 bits, head dim <= 64, many queries and keys: three warpgroups hide exponentials better"
    element, out = ELEMENT_OF[problem.kv_dtype or problem.dtype], ELEMENT_OF[problem.dtype]
    operands = OperandFormat(element, problem.dim_qk, problem.dim_v, eight_bit_of(problem), out)
    config = SM90Config(operands, consumers, 128, kv_stages, q_stages, v, registers, many and wide <= 128)
    return _fitted(config), why


def _fitted(config: SM90Config) -> SM90Config:
    """The config with fewer columns of the output stored at once, until scales fit in shared memory, too."""
    config = fit_output(config)
    while config.smem_bytes + ALIGNMENT > SMEM_LIMIT and config.store_parts[0] > LEAST_STORED:
        config = replace(config, store_parts=(config.store_parts[0] // 2,))
    return config
