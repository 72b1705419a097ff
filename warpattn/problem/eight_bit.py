"""Rules of 8-bit keys and values: dtypes and scales of a call, and which of them an architecture's kernels take."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import Rules, many
from warpattn.problem.backends import KERNEL_DTYPES, LATENT, LIMITS, USE_REFERENCE, EightBitLimits
from warpattn.problem.gradients import refuse_gradients
from warpattn.problem.problem import Call, Problem, Scales
from warpattn.quantized import EIGHT_BIT, check_scale, check_scale_values, check_transposed, granularity
from warpattn.sequences import Dense, PagedKV, PagedRagged
from warpattn.sequences.latent import LatentPages

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_types(rules: Rules, call: Call, read_values: bool) -> None:
    """Check that q, k and v have one dtype, or k and v one of 8 bits; check scales, with `read_values` their values."""
    sequence = call.sequence
    queries, *values = sequence.operands(call.q, call.k, call.v).items()
    (_, q), (k_name, k), _ = queries, *values
    if not isinstance(q, Tensor):
        return
    narrow = q.dtype in EIGHT_BIT
    in_latents = _latents(call) is not None
    in_pages = isinstance(sequence, PagedKV | PagedRagged)  # whose tokens' scales `check_values` reads
    if q.dtype not in DTYPES and not narrow:
        rules.add(f"q has dtype {q.dtype}", f"q must be one of {', '.join(str(x) for x in DTYPES)}, or of 8 bits")
    for (name, x), scale_name in zip_longest((*values, queries), sequence.scale_names):
        if not isinstance(x, Tensor):
            continue
        if x.dtype != q.dtype and (narrow or x.dtype not in EIGHT_BIT):
            more = "" if narrow else ", or one of 8 bits"
            rules.add(f"{name} has dtype {x.dtype}", f"{name} must have the dtype of q, {q.dtype}{more}")
        elif isinstance(k, Tensor) and x is not q and x.dtype != k.dtype and k.dtype in (*EIGHT_BIT, q.dtype):
            rules.add(f"{name} has dtype {x.dtype}", f"{name} must have the dtype of {k_name}, {k.dtype}")
        scale = sequence.scales().get(scale_name)
        if in_latents and x is not q:  # one scale of keys and values
            scale_name, scale = "kv.scale", scale if x is k else None
        if scale is not None and x.ndim >= 3:
            of_rows = isinstance(sequence, Dense) and scale is not sequence.v_scale
            of_tokens = in_pages and x is not q and getattr(scale, "ndim", 0) > 1
            read = read_values and not of_tokens
            _check_scale(rules, (scale_name, scale), (name, x), read, of_rows)
    v_transposed = sequence.v_transposed
    if v_transposed is not None and isinstance(call.v, Tensor) and call.v.ndim == 4:
        check_transposed(rules, "v.transposed", v_transposed, call.v)


def _check_scale(
    rules: Rules, given: tuple[str, Tensor], values: tuple[str, Tensor], read_values: bool, of_rows: bool
) -> None:
    """Check a scale and its values, each with its name; `of_rows`: scales per block of tokens are allowed."""
    (scale_name, scale), (name, x) = given, values
    if x.dtype not in EIGHT_BIT:
        rules.add(f"{scale_name} is given", f"{name} has dtype {x.dtype}, and scales belong to values of 8 bits")
    elif check_scale(rules, scale_name, scale, name, x.shape, of_rows) and read_values:
        check_scale_values(rules, scale_name, scale)


def eight_bit_of(call: Call) -> dict[str, Any]:
    """Return the fields that 8-bit tensors of a checked call set in its `Problem`; none without such tensors."""
    sequence = call.sequence
    q, k, v = sequence.operands(call.q, call.k, call.v).values()
    if k.dtype not in EIGHT_BIT:
        return {}
    pairs = ((sequence.k_scale, k), (sequence.v_scale, v), (sequence.q_scale, q))
    scales = Scales(*(granularity(scale, x.shape) for scale, x in pairs))
    latents = _latents(call)
    rope = {} if latents is None else {"rope": latents.rope.shape[-1], "narrow_rope": latents.rope.dtype in EIGHT_BIT}
    fields = {"kv_dtype": k.dtype, "q_dtype": q.dtype if q.dtype in EIGHT_BIT else None, "scales": scales, **rope}
    return fields if sequence.v_transposed is None else fields | {"v_transposed": True}


def _latents(call: Call) -> LatentPages | None:
    """Return the cache of a call if it holds 8-bit latents, else None."""
    cache = call.sequence.kv if isinstance(call.sequence, PagedRagged) else call.sequence
    return cache if isinstance(cache, LatentPages) else None


def check_eight_bit(rules: Rules, arch: str, problem: Problem, differentiated: tuple[str, ...] = ()) -> None:
    """Check that the kernels of `arch` take a problem with 8-bit keys and values."""
    dtype = problem.kv_dtype
    if dtype is None:
        return
    narrow, limits = problem.q_dtype is not None, LIMITS[arch].eight_bit
    with_8, them = ("8-bit queries", "q, k and v") if narrow else ("8 bits", "keys and values")
    what = f"{them} have dtype {dtype}"
    refuse_gradients(rules, differentiated, f"8-bit {them} have no backward; {USE_REFERENCE}")
    if problem.rope:
        _check_latents(rules, arch, problem, limits)
        return
    if limits is None or (narrow and not limits.queries):
        rules.add(what, f"the {arch} backend has no kernels for {with_8}; {USE_REFERENCE} or dequantise them")
        return
    scales = problem.block_scales if narrow and limits.product_scales else problem.scales
    for found, allowed, named in (
        (dtype, limits.queries if narrow else limits.dtypes, what),
        (problem.kind, limits.kinds, f"8-bit {them} are {problem.kind}"),
        *(
            (per, limits.scales_of(name, narrow), f"{name} has a scale per {per}")
            for name, per in scales._asdict().items()
        ),
    ):
        listed = ", ".join(str(each) for each in allowed if each is not None)
        rule = f"with {with_8} the {arch} backend takes {listed}; {USE_REFERENCE} or dequantise them"
        rules.require(found in allowed, named, rule)
    rule = f"the {arch} backend writes {' and '.join(str(x) for x in KERNEL_DTYPES)}; {USE_REFERENCE} for others"
    rules.require(problem.dtype in KERNEL_DTYPES, f"out has dtype {problem.dtype}", rule)
    _check_fp16(rules, arch, problem, limits)
    for name, size, unit in (
        ("head_dim of k", problem.dim_qk, limits.columns),
        ("head_dim of v", problem.dim_v, limits.columns),
        ("the page size", problem.page_size, limits.rows),
    ):
        rule = f"with {with_8} the {arch} backend takes multiples of {unit}; {USE_REFERENCE}"
        rules.require(size % unit == 0, f"{name} is {size}", rule)
    wide, most = max(problem.dim_qk, problem.dim_v), limits.product_dim if narrow else limits.max_dim
    rule = f"with {with_8} the {arch} backend takes at most {most}; {USE_REFERENCE} or dequantise them"
    rules.require(wide <= most, f"the head_dim is {wide}", rule)


def _check_fp16(rules: Rules, arch: str, problem: Problem, limits: EightBitLimits) -> None:
    """Refuse fp16 where it cannot hold products with scales per token or block: weights times those of values, and keys
    times their own, where kernels compute these products in fp16."""
    if problem.dtype != torch.float16:
        return
    few = problem.longest_q <= limits.fp16_tokens and problem.kind != "ragged"
    of_fp16 = f"{'q' if problem.q_dtype is None else 'out'} has dtype {problem.dtype}"
    for operand, per, taken in (("k", problem.scales.k, few or limits.fp16_keys), ("v", problem.scales.v, few)):
        if per not in (None, "tensor", "head"):
            which = f"of {operand} per {'block of columns' if isinstance(per, int) else per}"
            most = f"at most {limits.fp16_tokens} of fp16" if limits.fp16_tokens else "none of fp16"
            rule = f"with scales {which}, which fp16 operands cannot hold, the {arch} backend takes {most}"
            rule = f"{rule}; use bf16, or scales per head"
            rules.require(taken, f"{of_fp16} and q up to {many(problem.longest_q, 'token')} a sequence", rule)


def _check_latents(rules: Rules, arch: str, problem: Problem, limits: EightBitLimits | None) -> None:
    """Check that the kernels of `arch` take 8-bit latents with a rotary part."""
    instead = f"{USE_REFERENCE} or dequantise them"
    if limits is None or not limits.latents or (problem.dim_qk, problem.dim_v) != LATENT:
        which = f"{problem.dim_v} + {problem.rope} columns"
        rules.add(f"the latents are {which} of {problem.kv_dtype}", f"the {arch} backend has no such kernel; {instead}")
        return
    for found, allowed, what in (
        (problem.kv_dtype, limits.dtypes, f"latents have dtype {problem.kv_dtype}"),
        (problem.kind, ("paged", "paged-ragged"), f"the latents are {problem.kind}"),
        (problem.dtype, (torch.bfloat16,), f"q has dtype {problem.dtype}"),
        (problem.scales.k, limits.latents, f"latents have a scale per {problem.scales.k}"),
    ):
        listed = ", ".join(str(each) for each in allowed if each is not None)
        rules.require(found in allowed, what, f"of 8-bit latents the {arch} backend takes {listed}; {instead}")
    rule = f"of 8-bit latents the {arch} backend takes multiples of {limits.rows}; {USE_REFERENCE}"
    rules.require(problem.page_size % limits.rows == 0, f"the page size is {problem.page_size}", rule)
