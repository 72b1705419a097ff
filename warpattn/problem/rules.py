"""Checks every rule of a call before anything is launched.

`validate` checks a call and returns it with its frozen `Problem`: the sizes, dtypes and traced functions that decide
which kernel runs. Rules are here, in `sequences/` and, for arguments that few calls have, in `beside.py`,
`gradients.py`, `eight_bit.py` and `latent.py`. One function checks the limits of an architecture's kernels:

    validate(call)          the call's kind, dtype and sizes     ─┐
                                                                  ├─▶ check_limits
    plan(problem, arch)     sizes, then the problem's own        ─┘
"""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from warpattn.errors import AttentionError, Rules
from warpattn.inputs import kind_of, number, of_type
from warpattn.masks import Full, Mask, MaskProgram
from warpattn.problem.backends import KERNEL_DTYPES, LATENT, LIMITS, USE_REFERENCE, choose_backend
from warpattn.problem.beside import check_beside, check_values
from warpattn.problem.eight_bit import DTYPES, check_eight_bit, check_types, eight_bit_of
from warpattn.problem.gradients import check_gradients
from warpattn.problem.latent import check_latent, check_latent_view, check_rope
from warpattn.problem.operands import LEAST_SCALE
from warpattn.problem.problem import Call, CheckedCall, Problem
from warpattn.quantized import EIGHT_BIT, result_dtype
from warpattn.scores import CustomScore, Score, ScoreProgram, chained
from warpattn.sequences import Sizes

MAX_SIZE = 2**31 - 1  # kernels count rows, keys, heads and sequences with 32 bits
FULL_PROGRAM = Full().program()  # without a mask
ALIKE = tuple({dtype} for dtype in DTYPES)
LARGEST_SCALE = torch.finfo(torch.float32).max
# Kernels fold the scale into the exponential, as c = scale * log2(e): right if c is a normal number above 0, and half
# of c times the largest product is fp32 (`row_scale` takes the power of two below c; Hopper: sm90/arguments.py).
# With other scales they multiply the scores before they take the maximum of a row, as they do where there is a score
# function; a call without one gets AS_IT_IS, which leaves scores as they are.
FOLDED = 0.5
AS_IT_IS = CustomScore(lambda s, b, h, q, k: s).program()


def validate(call: Call, read_values: bool = True) -> CheckedCall:
    """Check a call against every rule; the AttentionError lists all that are broken.

    Offsets, lengths and page tables are read back and checked when the reference runs, which walks them on the host
    anyway; for a GPU backend, and without `read_values`, the caller promises that they are right.
    """
    rules, sequence = Rules(), call.sequence
    ranked = sequence.check(rules, call.q, call.k, call.v)
    sizes = sequence.sizes(call.q, call.k, call.v) if ranked else None
    lse_shape = () if sizes is None else sequence.lse_shape(sizes)
    operands, scales, indices = sequence.operands(call.q, call.k, call.v), sequence.scales(), sequence.indices()
    tensors = [x for x in operands.values() if isinstance(x, Tensor)]
    backend = choose_backend(rules, call.backend, call.q)
    on_host = backend is not None and (backend == "reference" or backend.startswith("simulate:"))
    _check_options(rules, call)
    mask, score = _traced(rules, call)
    plain = {x.dtype for x in tensors} in ALIKE and not scales
    scale = exponent = 0.0
    if sizes is not None and not rules.broken:
        scale = _scale(call, sizes)
        if backend != "reference":
            exponent = _largest_exponent(scale, sizes.dim_qk, call.q.dtype if plain else None)
            folded = scale > LEAST_SCALE and exponent * FOLDED < LARGEST_SCALE
            score = AS_IT_IS if score is None and not folded else score
    if not plain:
        check_types(rules, call, read_values and on_host)
    captured = [x for program in (mask, score) if program is not None for x in program.tensors]
    given = any(x is not None for x in (call.sinks, call.out, call.score))
    if sizes is not None and (given or captured or mask is None):  # a mask of indices alone fits every call
        check_beside(rules, call, sizes, _result_dtype(call))
    _check_devices(rules, call, operands | indices, captured)
    names = ()
    of_score = [] if score is None else score.tensors
    if is_differentiated([*tensors, *scales.values(), call.sequence.q_rope, call.sinks, call.out, *of_score]):
        names = check_gradients(rules, call, backend, sizes, () if score is None else score.tensors)
    if backend is not None and backend != "reference":
        _check_kernels(rules, call, backend.removeprefix("simulate:"), sizes, plain, names, read_values)
    if read_values and not rules.broken and sizes is not None and on_host:
        check_values(rules, call, sizes)
    if rules.broken:
        rules.done()
    assert sizes is not None and backend is not None and mask is not None  # else a rule was broken
    problem = _problem(call, sizes, mask, score, plain)
    return CheckedCall(backend, problem, mask, score, scale, lse_shape, names, exponent)


def _check_options(rules: Rules, call: Call) -> None:
    """Check mask, score, scale and return_lse as far as that needs no tensor."""
    for name, value, kind, such, made_by in (
        ("mask", call.mask, Mask, "Causal()", "Materialized(tensor) and CustomMask(function)"),
        ("score", call.score, Score, "SoftCap(30.0)", "Bias(tensor) and CustomScore(function)"),
    ):
        if value is not None and not isinstance(value, kind):
            given = f"the class {value.__name__}" if isinstance(value, type) else of_type(value)
            rule = f"{name} must be None or a {kind.__name__} such as warpattn.{such}; {made_by} make one"
            rules.add(f"{name} is {given}", rule)
    scale = 1.0 if call.scale is None else number(call.scale)
    if scale is None or not abs(scale) <= LARGEST_SCALE:
        rules.add(f"scale is {kind_of(call.scale)}", "scale must be None (1/sqrt(head_dim)) or a finite number of fp32")
    if not isinstance(call.return_lse, bool):
        rules.flag("return_lse", call.return_lse)


def _traced(rules: Rules, call: Call) -> tuple[MaskProgram | None, ScoreProgram | None]:
    """Trace mask and score; an additive mask becomes the last part of the score."""
    mask = call.mask if isinstance(call.mask, Mask) else None
    score = call.score if isinstance(call.score, Score) else None
    try:
        program, added = (FULL_PROGRAM, None) if mask is None else (mask.program(), mask.additive())
        if mask is not None and not isinstance(added, Score | None):
            mask.refuse_result("additive", kind_of(added), "it must return None or a score")
        if added is not None:
            score = chained(score, added)
        return program, None if score is None else score.program()
    except AttentionError as error:
        rules.broken.extend(error.reasons)
        return None, None


def _check_devices(rules: Rules, call: Call, named: dict[str, Tensor], captured: list[Tensor]) -> None:
    """Require all tensors on the device of q; `named`: those of the sequence."""
    if not isinstance(call.q, Tensor):
        return
    pairs = [*named.items(), ("sinks", call.sinks), ("out", call.out)]
    pairs += [("a tensor captured by the mask or the score", x) for x in captured]
    for name, x in pairs:
        if isinstance(x, Tensor) and x.device != call.q.device:
            rules.require(False, f"{name} is on {x.device}", f"it must be on the device of q, {call.q.device}")


def _check_kernels(
    rules: Rules, call: Call, arch: str, sizes: Sizes | None, plain: bool, names: tuple[str, ...], read_values: bool
) -> None:
    """Check that the kernels of `arch` take a call; `plain`: no 8-bit tensors; `names` require gradients."""
    narrow = getattr(call.q, "dtype", None)
    check_limits(rules, arch, call.sequence.kind, KERNEL_DTYPES[0] if narrow in EIGHT_BIT else narrow, sizes)
    if sizes is None:
        return
    if not plain and not rules.broken:
        check_eight_bit(rules, arch, _problem(call, sizes, FULL_PROGRAM, None, plain), names)
    if read_values and LIMITS[arch].latent and is_latent(sizes):
        check_latent_view(rules, call)
    if call.sequence.q_rope is not None:
        check_rope(rules, call.sequence.q_rope, sizes)


def is_differentiated(tensors: list[Tensor | None]) -> bool:
    """Whether a tensor requires gradients, or a transform of torch.func or forward-mode AD is active."""
    wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)
    return wanted or peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _scale(call: Call, sizes: Sizes) -> float:
    scale = None if call.scale is None else number(call.scale)
    return sizes.dim_qk**-0.5 if scale is None else float(scale)


def _largest_exponent(scale: float, dim: int, dtype: torch.dtype | None) -> float:
    """Bound c * (q . k) for finite operands of `dtype` whose q . k is an fp32 number; None: operands with scales."""
    most = torch.finfo(dtype).max if dtype in KERNEL_DTYPES else LARGEST_SCALE
    product = min(dim * most * most, LARGEST_SCALE)
    return scale * math.log2(math.e) * product


def _result_dtype(call: Call) -> torch.dtype | None:
    """Return the dtype of the output; None where q is no tensor."""
    if not isinstance(call.q, Tensor) or call.q.dtype not in EIGHT_BIT:
        return getattr(call.q, "dtype", None)
    return result_dtype(call.q.dtype, call.out.dtype if isinstance(call.out, Tensor) else None)


def _problem(call: Call, sizes: Sizes, mask: MaskProgram, score: ScoreProgram | None, plain: bool) -> Problem:
    return Problem(
        kind=call.sequence.kind,
        device_type=call.q.device.type,
        dtype=_result_dtype(call) or call.q.dtype,
        **{field.name: getattr(sizes, field.name) for field in fields(sizes)},
        mask=mask.key,
        score=None if score is None else score.key,
        has_sinks=call.sinks is not None,
        has_lse=call.return_lse,
        q_rope=0 if call.sequence.q_rope is None else call.sequence.q_rope.shape[-1],
        **({} if plain else eight_bit_of(call)),
    )


def is_latent(sizes: Sizes | Problem) -> bool:
    """Whether head dims are those of absorbed latent attention."""
    return (sizes.dim_qk, sizes.dim_v) == LATENT


def check_limits(rules: Rules, arch: str, kind: str, dtype: torch.dtype | None, sizes: Sizes | Problem | None) -> None:
    """Check that the kernels of `arch` take a sequence kind, dtype and sizes; `sizes` is None where ranks are wrong."""
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
        check_latent(rules, kind, sizes)
    else:
        _check_dims(rules, arch, sizes)


def _check_dims(rules: Rules, arch: str, sizes: Sizes | Problem) -> None:
    """Check that the kernels have these head dims."""
    limits = LIMITS[arch]
    either = f", or {LATENT.qk} with values of {LATENT.v} (latent attention)" if limits.latent else ""
    dims = {"q": sizes.dim_qk} if sizes.dim_qk == sizes.dim_v else {"q": sizes.dim_qk, "v": sizes.dim_v}
    for name, dim in dims.items():
        if dim > limits.max_dim:
            rule = f"the {arch} backend takes head dims up to {limits.max_dim}{either}; {USE_REFERENCE} for others"
            rules.add(f"{name} has head_dim {dim}", rule)
