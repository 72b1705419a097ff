"""The short way of a call like one that was checked and launched before: no rules, no plan, just its launch.

    key = what the rules and the plan have read: shapes, strides, dtypes, devices, traced mask and score, options
    key -> Planned: allocate the output, write addresses, launch          about 10 us on the host instead of 200
             Prepared   dense prefill: safe on any stream and in captures
             Repeat     every other kernel, one per stream since it has a workspace; a capture goes the long way

Whatever a check has read is part of the key, or is looked at again in every call: gradients, the current device,
addresses, captured tensors. A call that is in any way unusual goes the long way. Masks and scores are known by their
traced programs, which equal values share; programs that hold tensors are referred to weakly, so nothing is kept alive.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import finalize, ref

import torch
from torch import Tensor

from warpattn.language.traced import Traced
from warpattn.masks import Mask, MaskProgram
from warpattn.problem import Call, CheckedCall, is_latent
from warpattn.problem.operands import ALIGNMENT, Operands, addressable, captured, described
from warpattn.runtime import cuda
from warpattn.runtime.bound_launches import BoundLaunches
from warpattn.runtime.dense_launch import Prepared, launches_dense, prepare
from warpattn.runtime.plan import list_launches
from warpattn.runtime.prefill_launcher import captured_values
from warpattn.scores import Score, ScoreProgram
from warpattn.sequences import Dense, Ragged, Sequence

__all__ = ["recall", "remember"]

Result = Tensor | tuple[Tensor, Tensor]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # q, k, v, sinks, out
Options = tuple[float | None, bool, str]  # scale, return_lse, backend

AT_MOST = 2048
STREAMS = 16  # whose workspaces are kept for one key

_UNUSUAL = (AttributeError, LookupError, RuntimeError, TypeError)
_known: dict[Hashable, Planned] = {}


def recall(
    inputs: Inputs, mask: Mask | None, score: Score | None, options: Options, sequence: Sequence | None = None
) -> Result | None:
    """The result of a call whose like has been remembered; None if there is none, or if this one needs the long way.

    `sequence` is None for dense batches.
    """
    try:
        key, mask_program, score_program = _key(inputs, mask, score, options)
        known = _known.get(key if sequence is None else (key, _layout(sequence)))
    except _UNUSUAL:
        return None
    return None if known is None else known(inputs, mask_program, score_program, sequence)


def remember(call: Call, checked: CheckedCall, out: Tensor, lse: Tensor | None) -> None:
    """Keep the short way of a call that has just been launched with results `out` and `lse`, if it has one."""
    q, k, v, sinks = call.q, call.k, call.v, call.sinks
    mask, score = call.mask, call.score
    if checked.problem.seq_k == 0 or checked.problem.seq_q == 0 or (mask is not None and mask.additive() is not None):
        return
    if not all(addressable(x) for x in (q, k, v, out)):
        return
    if sinks is not None and (sinks.dtype != torch.float32 or not sinks.is_contiguous()):
        return
    inputs, options = (q, k, v, sinks, call.out), (call.scale, call.return_lse, call.backend)
    dense = isinstance(call.sequence, Dense)
    try:
        key, *programs = _key(inputs, mask, score, options)
        key = key if dense else (key, _layout(call.sequence))
        known = _known.get(key) or Planned(checked, Operands(q, k, v, out, lse, sinks))
        known.prepare(checked, Operands(q, k, v, out, lse, sinks), call.sequence)
    except _UNUSUAL:
        return
    if len(_known) >= AT_MOST:
        _known.clear()
    _known[key] = known
    for program in programs:
        if program is not None and program.tensors:  # such as a Padding made anew for each step
            finalize(program, _known.pop, key, None).atexit = False


class Planned:
    """The launch of all calls with one key."""

    __slots__ = ("_captures", "_device", "_latent", "_like_q", "_lse_shape", "_out", "_prepared", "_repeats")

    def __init__(self, checked: CheckedCall, x: Operands) -> None:
        self._prepared: Prepared | None = None
        self._repeats: dict[int, BoundLaunches] = {}  # by stream
        self._device = x.q.get_device()
        self._out = {"size": tuple(x.out.shape), "dtype": x.out.dtype, "device": x.out.device}
        self._like_q = x.q.is_contiguous() and x.q.shape == x.out.shape  # empty_like costs half of empty
        self._lse_shape = checked.lse_shape if checked.problem.has_lse else None
        self._captures = bool(captured(checked))
        self._latent = is_latent(checked.problem)  # then v is a view of k

    def prepare(self, checked: CheckedCall, x: Operands, sequence: Sequence) -> None:
        """Make ready for torch's current stream; LookupError if the launches of a call cannot be repeated."""
        if launches_dense(checked):
            self._prepared = prepare(checked, x)
        elif not cuda.is_capturing():
            if len(self._repeats) >= STREAMS:
                self._repeats.clear()
            self._repeats[cuda.current_stream(self._device)] = BoundLaunches.of(
                list_launches(checked, x, sequence), checked, x, sequence
            )

    def __call__(
        self, inputs: Inputs, mask: MaskProgram | None, score: ScoreProgram | None, sequence: Sequence | None
    ) -> Result | None:
        """Launch on torch's current stream; None if this call needs the long way."""
        q, k, v, sinks, out = inputs
        if cuda.current_device() != self._device:
            return None
        values = ()
        if self._captures:
            tensors = (mask.tensors if mask is not None else ()) + (score.tensors if score is not None else ())
            grad = torch.is_grad_enabled()
            if any(x.get_device() != self._device or (grad and x.requires_grad) for x in tensors):
                return None
            values = captured_values(tensors)
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if out is None:
            out = torch.empty_like(q) if self._like_q else torch.empty(**self._out)
        out_at = out.data_ptr()
        if (q_at | k_at | v_at | out_at) % ALIGNMENT or (self._latent and k_at != v_at):
            return None
        sinks_at = 0 if sinks is None else sinks.data_ptr()
        lse, lse_at = None, 0
        if self._lse_shape is not None:
            lse = torch.empty(self._lse_shape, dtype=torch.float32, device=out.device)
            lse_at = lse.data_ptr()
        if self._prepared is not None:
            self._prepared((q_at, k_at, v_at, out_at), (lse_at, sinks_at), values)
        else:
            repeat = None if cuda.is_capturing() else self._repeats.get(cuda.current_stream(self._device))
            if repeat is None:
                return None
            indices = () if sequence is None else [x.data_ptr() for x in sequence.indices().values()]
            repeat((q_at, k_at, v_at, out_at, lse_at, sinks_at, *indices), values)
        return out if lse is None else (out, lse)


def _layout(sequence: Sequence) -> Hashable:
    """What identifies where the sequences of a batch lie, but for the values of offsets, lengths and tables."""
    bounds = (sequence.max_q, sequence.max_k) if isinstance(sequence, Ragged) else ()
    return (type(sequence), bounds, *(described(x) for x in sequence.indices().values()))


def _key(
    inputs: Inputs, mask: Mask | None, score: Score | None, options: Options
) -> tuple[Hashable, MaskProgram | None, ScoreProgram | None]:
    """What identifies a call, and its programs; raises one of `_UNUSUAL` for values that have no such identity."""
    q, k, v, sinks, out = inputs
    # 1 == True, but one of them is no scale and the other no flag.
    if not (type(q) is type(k) is type(v) is Tensor) or type(options[0]) is bool or type(options[1]) is not bool:
        raise TypeError
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
        mask_program = mask.__dict__.get("_program") or Traced.shared[mask]
        mask_id = ref(mask_program)
    if score is not None:
        score_program = score.__dict__.get("_program") or Traced.shared[score]
        score_id = ref(score_program)
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.get_device(), k.get_device(), v.get_device(), mask_id, score_id, options,
        None if sinks is None else described(sinks), None if out is None else described(out),
    )  # fmt: skip
    return key, mask_program, score_program
