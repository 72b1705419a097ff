"""Runs a call: by launches that a call like it left behind, or by the reference, the simulator or a card's kernels.

    attend(call) ─ recall ─▶ launch                                                   a repeated call
                 ─ validate ─▶ CheckedCall ─┬─▶ reference                             on the CPU
                                            ├─▶ simulate.run                          "simulate:…"
                                            ├─▶ list_launches, launch_all, remember   on a card
                                            └─▶ returned: training.autograd runs it   with gradients

A repeated call skips validation and planning, which takes about 10 us on the host instead of 200:

    key = all that rules and plan depend on: shapes, strides, dtypes, devices, traced mask and score, options
    key -> CachedCall: allocate the output, write addresses, launch

Launches without a workspace serve all streams and captures; others are kept once per stream, and a captured call is
validated and planned. Everything that a check depends on is part of the key or is checked again in each call:
gradients, the current device, addresses, captured tensors. A call that is unusual in any way is validated and planned.
The key has weak references to the traced programs of masks and scores, which equal values share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.autograd import forward_ad as forward

from warpattn.masks import MaskProgram
from warpattn.problem import Call, CheckedCall, is_latent, validate
from warpattn.problem.memory import apart, extent, overwrite
from warpattn.problem.operands import (
    ALIGNMENT,
    Operands,
    captured,
    captured_values,
    described,
    fitted,
    hand_over,
    logits,
    without_keys,
)
from warpattn.reference import reference
from warpattn.runtime import cuda
from warpattn.runtime.bound_launches import BoundLaunches, launch_all
from warpattn.runtime.captures import graph_owns_memory
from warpattn.runtime.launches import list_launches
from warpattn.scores import ScoreProgram
from warpattn.sequences import Dense, Sequence

Result = Tensor | tuple[Tensor, Tensor]

AT_MOST = 2048  # remembered calls
MOST_BYTES = 2**30  # that `_held` may be
STREAMS = 16  # most streams whose workspaces are kept for one key

_UNUSUAL = (AttributeError, LookupError, RuntimeError, TypeError)
_known: dict[Hashable, CachedCall] = {}
_held = 0  # bytes of the workspaces of remembered calls


def attend(call: Call) -> Result | CheckedCall:
    """Return out, or (out, lse), of a call of any sequence kind; if kernels would run and an input requires gradients,
    the checked call, for `training.autograd`. Raises AttentionError listing every broken rule."""
    result = recall(call)
    if result is not None:
        return result
    checked = validate(call)
    if checked.backend == "reference":
        out, lse = _refer(call, checked)
    elif checked.differentiated:
        return checked
    else:
        out, lse = _run_kernels(call, checked)
    return (out, lse) if call.return_lse and lse is not None else out


def _refer(call: Call, checked: CheckedCall) -> tuple[Tensor, Tensor | None]:
    """Compute the result by the reference, in fp32 (fp64 for fp64), rounded once."""
    out, lse = reference(
        call.q,
        call.k,
        call.v,
        sequence=call.sequence,
        mask=call.mask,
        score=call.score,
        sinks=call.sinks,
        scale=checked.scale,
        dtype=torch.float64 if call.q.dtype == torch.float64 else torch.float32,
    )
    return (out.to(checked.problem.dtype) if call.out is None else overwrite(call.out, out)), lse


def _run_kernels(call: Call, checked: CheckedCall) -> tuple[Tensor, Tensor | None]:
    """Compute the result by kernels, simulated or on torch's current stream of the operands' device."""
    q = call.q
    shape, kind = (*q.shape[:-1], checked.problem.dim_v), checked.problem.dtype
    out = q.new_empty(shape, dtype=kind) if call.out is None else call.out
    lse = q.new_empty(checked.lse_shape, dtype=torch.float32) if call.return_lse else None
    operands = Operands(q, call.k, call.v, out, lse, call.sinks)
    if checked.problem.seq_k == 0 or out.numel() == 0:
        without_keys(operands)
    elif checked.backend.startswith("simulate:"):
        from warpattn.runtime import simulate  # imports NumPy and Triton

        simulate.run(checked, operands, call.sequence)
    else:
        _run_on_card(call, checked, operands)
    return out, lse


def _run_on_card(call: Call, checked: CheckedCall, operands: Operands) -> None:
    """Launch, and keep the launches for the next call like this one."""
    device = operands.q.get_device()
    with contextlib.nullcontext() if cuda.current_device() == device else torch.cuda.device(device):
        fitting = fitted(operands)
        bound = launch_all(list_launches(checked, fitting, call.sequence), device)
        hand_over(fitting, operands)
        remember(call, checked, fitting, bound)


def recall(call: Call) -> Result | None:
    """Run a call by remembered launches and return its result; None if there are none, or if it must be validated."""
    try:
        key, mask, score = _identify(call)
        known = _known.get(key)
    except _UNUSUAL:
        return None
    return None if known is None else known(call, mask, score)


def remember(call: Call, checked: CheckedCall, x: Operands, bound: BoundLaunches) -> None:
    """Keep the launches of a call that has just run on operands `x`, if they serve other tensors as well."""
    if call.mask is not None and call.mask.additive() is not None:
        return  # the additive part is a separate score, made anew in every call
    if call.sinks is not None and call.sinks.stride(0) != 1:
        return  # see `_identify`: the imaginary part of a complex tensor
    given = (call.q, call.k, call.v, x.out if call.out is None else call.out)
    if any(a.data_ptr() != b.data_ptr() for a, b in zip(given, (x.q, x.k, x.v, x.out), strict=True)):
        return  # a tensor was copied
    try:
        key, *programs = _identify(call)
        bound.follow_call(checked, x, call.sequence)
        known = _known.get(key) or CachedCall(checked, x, call)
    except _UNUSUAL:
        return
    if not known.keep(bound):
        return
    global _held
    _held += bound.workspace_bytes
    if len(_known) >= AT_MOST or _held > MOST_BYTES:
        forget()
        _held = bound.workspace_bytes
    _known[key] = known
    for program in programs:
        if program is not None and program.tensors:  # such as a Padding made anew for each step
            finalize(program, _known.pop, key, None).atexit = False


def forget() -> None:
    """Forget all launches, so that every call is planned anew; captured graphs stay as they are."""
    global _held
    _known.clear()
    _held = 0


class CachedCall:
    """The launches of all calls with one key."""

    __slots__ = ("_by_stream", "_device", "_extents", "_has_captured", "_latent", "_like_q", "_lse_shape", "_out",
                 "_shared", "_written")  # fmt: skip

    def __init__(self, checked: CheckedCall, x: Operands, call: Call) -> None:
        self._shared: BoundLaunches | None = None  # without a workspace
        self._by_stream: dict[int, BoundLaunches] = {}
        self._device = x.q.get_device()
        self._out = {"size": tuple(x.out.shape), "dtype": x.out.dtype, "device": x.out.device}
        alike = x.q.shape == x.out.shape and x.q.dtype == x.out.dtype
        self._like_q = alike and x.q.is_contiguous()  # empty_like costs half of empty
        self._lse_shape = checked.lse_shape if checked.problem.has_lse else None
        self._has_captured = bool(captured(checked))
        self._latent = is_latent(checked.problem)  # then v is a view of k
        rope, v_transposed = call.sequence.q_rope, call.sequence.v_transposed
        read = (x.q, x.k, x.v, x.sinks, v_transposed if rope is None else rope) if call.out is not None else ()
        self._extents = tuple([0 if t is None else extent(t) for t in read])
        self._written = extent(x.out) if call.out is not None else 0

    def keep(self, bound: BoundLaunches) -> bool:
        """Keep the launches for every stream or, with a workspace that no graph owns, for torch's current one."""
        if not bound.workspace:
            self._shared = bound
        elif graph_owns_memory(self._device):
            return False
        else:
            if len(self._by_stream) >= STREAMS:
                self._by_stream.clear()
            self._by_stream[cuda.current_stream(self._device)] = bound
        return True

    def __call__(self, call: Call, mask: MaskProgram | None, score: ScoreProgram | None) -> Result | None:
        """Launch on torch's current stream; None if this call must be validated."""
        q, k, v, sinks, out, sequence = call.q, call.k, call.v, call.sinks, call.out, call.sequence
        extra = sequence.v_transposed if sequence.q_rope is None else sequence.q_rope  # 8-bit queries have no rope
        if cuda.current_device() != self._device:
            return None
        bound = self._shared
        if bound is None:
            bound = None if cuda.is_capturing() else self._by_stream.get(cuda.current_stream(self._device))
            if bound is None:
                return None
        values = ()
        if self._has_captured:
            tensors = (mask.tensors if mask is not None else ()) + (score.tensors if score is not None else ())
            grad = torch.is_grad_enabled()
            if any(x.get_device() != self._device or (grad and x.requires_grad) for x in tensors):
                return None
            values = captured_values(tensors)
        try:
            q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        except RuntimeError:  # no address, such as a tensor of torch.vmap
            return None
        if sinks is not None:
            sinks = logits(sinks)  # a copy if they have 16 bits; it lives until the launch
        sinks_at, extra_at = 0 if sinks is None else sinks.data_ptr(), 0 if extra is None else extra.data_ptr()
        if out is None:
            out = torch.empty_like(q) if self._like_q else torch.empty(**self._out)
            out_at = out.data_ptr()
        else:
            out_at = out.data_ptr()
            if not apart((out_at, self._written), (q_at, k_at, v_at, sinks_at, extra_at), self._extents):
                return None
        if (q_at | k_at | v_at | out_at | extra_at) % ALIGNMENT or (self._latent and k_at != v_at):
            return None
        lse, lse_at = None, 0
        if self._lse_shape is not None:
            lse = torch.empty(self._lse_shape, dtype=torch.float32, device=out.device)
            lse_at = lse.data_ptr()
        indices = () if _is_plain(sequence) else [x.data_ptr() for x in sequence.indices().values()]
        bound((q_at, k_at, v_at, out_at, lse_at, sinks_at, *indices), values)  # in the order of `follow_call`
        return out if lse is None else (out, lse)


def _is_plain(sequence: Sequence) -> bool:
    """Whether a sequence holds no tensors."""
    unscaled = sequence.k_scale is sequence.v_scale is sequence.q_scale is None
    return type(sequence) is Dense and unscaled and sequence.q_rope is sequence.v_transposed is None


def _layout(sequence: Sequence) -> Hashable:
    """The key of a batch's layout: all but the values of offsets, lengths and tables."""
    named = sequence.indices()
    if torch.is_grad_enabled() and any(x.requires_grad for x in named.values()):
        raise TypeError
    return (type(sequence), sequence.bounds(), *named, *[described(x) for x in named.values()])


def _identify(call: Call) -> tuple[Hashable, MaskProgram | None, ScoreProgram | None]:
    """Return the key of a call, and its programs; raises one of `_UNUSUAL` for values that have no key."""
    q, k, v, sinks, out, mask, score = call.q, call.k, call.v, call.sinks, call.out, call.mask, call.score
    # 1 == True, but True is no scale and 1 no flag; of a tensor as scale the key would hold the identity, not the
    # number. A tensor that rules refuse for its negative bit has even strides, and none with those is remembered.
    scale = call.scale
    if not (type(q) is type(k) is type(v) is Tensor) or type(call.return_lse) is not bool:
        raise TypeError
    if (scale is not None and not isinstance(scale, float) and type(scale) is not int) or forward._current_level >= 0:
        raise TypeError  # tangents of forward-mode derivatives are beside the tensors
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (sinks is not None and sinks.requires_grad)
        or (out is not None and out.requires_grad)
    ):
        raise TypeError
    mask_program = score_program = mask_id = score_id = None
    if mask is not None:
        mask_program = mask.known_program()
        mask_id = ref(mask_program)
    if score is not None:
        score_program = score.known_program()
        score_id = ref(score_program)
    sequence = call.sequence
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), mask_id, score_id, scale, call.return_lse, call.backend,
        None if sinks is None else described(sinks), None if out is None else described(out),
        None if _is_plain(sequence) else _layout(sequence),
    )  # fmt: skip
    return key, mask_program, score_program
