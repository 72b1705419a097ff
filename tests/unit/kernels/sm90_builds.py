"""Kernels compiled once for all tests that look at machine code."""

from dataclasses import replace
from functools import cache

import torch

from tests.launches import small_call
from warpattn.kernels.sm90.prefill.choice import choose
from warpattn.kernels.sm90.prefill.config import SM90Config
from warpattn.kernels.sm90.prefill.launch import attention_launch
from warpattn.masks import Causal, Mask
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Choice, PlanOptions
from warpattn.runtime import compiler
from warpattn.sequences import Dense


@cache
def compiled(config: SM90Config):
    """The prefill kernel of a config with a causal mask and an LSE, for sm_90."""
    call = small_call("sm90", (config.dim_qk, config.dim_v), config.element, heads=(2 * config.packed, 2))
    choice = replace(choose(call.checked.problem, ARCHS["sm90"]), config=config)
    return compiler.compiled(attention_launch(*call, choice))


def chosen(
    batch: int, seq_q: int, seq_k: int, heads_q: int, heads_kv: int, dim: int, mask: Mask, *, invariant: bool = False
) -> Choice:
    """The planner's choice for a dense bf16 problem."""
    sizes = (batch, seq_q, heads_q, dim), (batch, seq_k, heads_kv, dim)
    q, k = (torch.empty(1, dtype=torch.bfloat16).expand(size) for size in sizes)
    problem = validate(Call(q, k, k, Dense(), mask, backend="simulate:sm90")).problem
    return choose(problem, ARCHS["sm90"], PlanOptions(batch_invariant=invariant))


def products(dim: int, seq: int = 8192) -> SM90Config:
    """The configuration of a causal problem of e4m3 with one scale each, a long one."""
    x = torch.empty(1, dtype=torch.float8_e4m3fn).expand(1, seq, 16, dim)
    call = Call(x, x, x, Dense(*[torch.ones(())] * 3), Causal(), backend="simulate:sm90")
    return choose(validate(call).problem, ARCHS["sm90"]).config
