"""What the kernels of an architecture take: one list of rules for calls with tensors and for plans without.

validate(call)          the call's kind, dtype and sizes     ─┐
                                                              ├─▶ check_limits
plan(problem, arch)     check_sizes, then the problem's own  ─┘
"""

from __future__ import annotations

import torch

from warpattn.errors import Rules
from warpattn.problem.backends import KERNEL_DTYPES, LATENT, LATENT_TOKENS, LIMITS, USE_REFERENCE
from warpattn.problem.problem import Problem
from warpattn.sequences import Sizes

__all__ = ["LATENT_WHERE", "MAX_SIZE", "check_limits", "check_sizes", "is_latent"]

MAX_SIZE = 2**31 - 1  # kernels count rows, keys, heads and sequences with 32 bits
LATENT_WHERE = f"with head dims {LATENT[0]} and {LATENT[1]} (latent attention)"


def is_latent(sizes: Sizes | Problem) -> bool:
    """Whether head dims are those of absorbed latent attention."""
    return (sizes.dim_qk, sizes.dim_v) == LATENT


def check_sizes(rules: Rules, problem: Problem) -> None:
    """Sizes of a problem, which tensors would have by themselves: none below its least, heads in whole groups."""
    least = {"batch": 1, "seq_q": 0, "seq_k": 0, "heads_q": 1, "heads_kv": 1, "dim_qk": 1, "dim_v": 1}
    for name, bound in least.items():
        size = getattr(problem, name)
        rules.require(size >= bound, f"{name} is {size}", f"{name} must be at least {bound}")
    groups = problem.heads_kv > 0 and problem.heads_q % problem.heads_kv == 0
    what = f"heads_q is {problem.heads_q} and heads_kv is {problem.heads_kv}"
    rules.require(groups, what, "the query heads must be a multiple of the key heads")


def check_limits(rules: Rules, arch: str, kind: str, dtype: torch.dtype | None, sizes: Sizes | Problem | None) -> None:
    """What the kernels of `arch` take of sequence kinds, dtypes and sizes; `sizes` is None where ranks are wrong."""
    limits = LIMITS[arch]
    if kind not in limits.kinds:
        rule = f"the {arch} backend takes {' and '.join(limits.kinds)} ones; {USE_REFERENCE}"
        rules.add(f"the keys and values are {kind}", rule)
    if dtype not in KERNEL_DTYPES:
        rule = f"the {arch} backend takes {' and '.join(str(x) for x in KERNEL_DTYPES)}; {USE_REFERENCE} for others"
        rules.add(f"q has dtype {dtype}", rule)
    if sizes is None:
        return
    for name in ("batch", "seq_q", "seq_k", "heads_q", "heads_kv"):
        size = getattr(sizes, name)
        if size > MAX_SIZE:
            rule = f"the {arch} backend takes at most {MAX_SIZE}; {USE_REFERENCE} for more"
            rules.add(f"{name} is {size}", rule)
    if limits.latent and is_latent(sizes):
        _check_latent(rules, kind, sizes)
    else:
        _check_dims(rules, arch, sizes)


def _check_dims(rules: Rules, arch: str, sizes: Sizes | Problem) -> None:
    """Head dims that the kernels have."""
    limits = LIMITS[arch]
    either = f", or {LATENT[0]} with values of {LATENT[1]} (latent attention)" if limits.latent else ""
    dims = {"q": sizes.dim_qk} if sizes.dim_qk == sizes.dim_v else {"q": sizes.dim_qk, "v": sizes.dim_v}
    for name, dim in dims.items():
        if dim > limits.max_dim:
            rule = f"the {arch} backend takes head dims up to {limits.max_dim}{either}; {USE_REFERENCE} for others"
            rules.add(f"{name} has head_dim {dim}", rule)


def _check_latent(rules: Rules, kind: str, sizes: Sizes | Problem) -> None:
    """Latent attention: few query tokens, and no ragged keys."""
    rule = f"{LATENT_WHERE} kernels take dense and paged ones; {USE_REFERENCE}"
    rules.require(kind in ("dense", "paged"), f"the keys and values are {kind}", rule)
    rule = (
        f"{LATENT_WHERE} kernels take at most {LATENT_TOKENS}; {USE_REFERENCE}, or expand keys and values for prefill"
    )
    few = "ragged" in kind or sizes.seq_q <= LATENT_TOKENS
    rules.require(few, f"q has {sizes.seq_q} tokens a sequence", rule)
