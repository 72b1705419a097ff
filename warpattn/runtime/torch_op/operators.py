"""Defines the operators `warpattn::attention` and `warpattn::attention_backward`, with their autograd functions.

    record(call) ── checks rules; mask and score become text, captured tensors inputs
      warpattn::attention(q, k, v, sinks, indices, mask tensors, score tensors, text) ─▶ out, lse
        backward ─▶ warpattn::attention_backward ─▶ dq, dk, dv, then those of sinks, indices and score tensors

Indices are the tensors of a sequence beside q, k and v: offsets, tables, scales, and the rotary part of queries in two
tensors. Only that part can have a gradient, from the reference; kernels have no backward for it.

An operator runs below autograd, so the backward operator differentiates the reference itself. For selective
checkpointing, `torch.ops.warpattn.attention.default` exists once this module has been imported.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence as Many
from typing import Any, cast

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.problem import Call, CheckedCall, validate
from warpattn.quantized import result_dtype
from warpattn.runtime import execute
from warpattn.runtime.execute import Result
from warpattn.runtime.torch_op import flops, program
from warpattn.runtime.training.gradients import Along, Saved, Wanted, checked_backward, take_gradients
from warpattn.runtime.training.recomputed import laid_like, recomputed


def attend(call: Call) -> Result:
    """Run a call through its operator, which torch's dispatch modes see: `make_fx`, fake tensors, checkpointing."""
    flops.tell_counters()
    return returned(call, *record(call))


def returned(call: Call, out: Tensor, lse: Tensor) -> Result:
    """What a call returns, of its operator's results."""
    if call.out is not None:
        out = call.out.copy_(out)
    return (out, lse) if call.return_lse else out


def record(call: Call) -> tuple[Tensor, Tensor]:
    """Run a call through its operator; return out and lse, an empty one if none is needed. Values are not checked."""
    q, k, v, sinks = call.q, call.k, call.v, call.sinks
    try:
        checked = validate(call, read_values=False)
    except AttentionError as error:  # raised when the graph runs: the tracer would hide it
        return _refuse(q.detach(), v.detach(), repr(error.reasons), call.return_lse is True)
    mask_tensors, score_tensors = list(checked.mask.tensors), list(checked.score.tensors if checked.score else ())
    with_lse = call.return_lse or bool(checked.differentiated)  # the backward needs it
    text = program.write(call, checked, with_lse)
    return _attention(q, k, v, sinks, list(call.sequence.indices().values()), mask_tensors, score_tensors, text)


@torch.library.custom_op("warpattn::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    indices: list[Tensor],
    mask_tensors: list[Tensor],
    score_tensors: list[Tensor],
    call: str,
) -> tuple[Tensor, Tensor]:
    """Compute out and lse in the shapes of the sequence kind; lse is empty if the call does not return it."""
    with torch.no_grad():
        result = _run(_called((q, k, v), sinks, indices, mask_tensors, score_tensors, call))
    out, lse = result if isinstance(result, tuple) else (result, _lse_like(q, False))
    return out.contiguous(), lse.contiguous()


@_attention.register_fake
def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    indices: list[Tensor],
    mask_tensors: list[Tensor],
    score_tensors: list[Tensor],
    call: str,
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=result_dtype(q.dtype))
    return out, _lse_like(q, program.has_lse(call))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save tensors for the backward; called only if an input requires gradients."""
    q, k, v, sinks, indices, mask_tensors, score_tensors, call = inputs
    lists = (indices, mask_tensors, score_tensors)
    ctx.save_for_backward(q, k, v, *output, sinks, *(tensor for listed in lists for tensor in listed))
    ctx.counts, ctx.call = [len(listed) for listed in lists], call


def _backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, *listed = ctx.saved_tensors
    needs_q, needs_k, needs_v, needs_sinks, needs_indices, _, needs_score, _ = ctx.needs_input_grad
    indices, mask_tensors, score_tensors = _split(listed, ctx.counts)
    wanted = [bool(need) for need in (needs_sinks, *needs_indices, *needs_score)]
    lists = (indices, mask_tensors, score_tensors)
    found = _attention_backward([dout, dlse], [q, k, v, out, lse], sinks, *lists, ctx.call, wanted)
    dq, dk, dv, *more = found
    given = iter(more)
    dsinks, *others = [next(given) if want else None for want in wanted]
    dindices, dscore = others[: len(indices)], others[len(indices) :]
    none = [None] * len(mask_tensors)
    dqkv = (dq if needs_q else None, dk if needs_k else None, dv if needs_v else None)
    return *dqkv, dsinks, dindices, none, dscore, None


_attention.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("warpattn::attention_backward", mutates_args=())
def _attention_backward(
    along: list[Tensor],  # dout and dlse
    saved: list[Tensor],  # q, k, v, out, lse
    sinks: Tensor | None,
    indices: list[Tensor],
    mask_tensors: list[Tensor],
    score_tensors: list[Tensor],
    call: str,
    wanted: list[bool],  # the sinks' gradient, then those of each index and each score tensor
) -> list[Tensor]:
    """Compute dq, dk, dv, then gradients of the sinks, indices and score tensors that require one, in this order."""
    q, k, v, out, lse = saved
    dsinks, dindices, dscore = wanted[0], wanted[1 : len(indices) + 1], wanted[len(indices) + 1 :]
    indices, score_tensors = _leaves(indices, dindices), _leaves(score_tensors, dscore)
    sinks = None if sinks is None else sinks.detach().requires_grad_(dsinks)
    again = _called(tuple(_leaves(saved[:3], [True] * 3)), sinks, indices, mask_tensors, score_tensors, call)
    with torch.no_grad():
        checked = validate(again)
        more = _chosen((sinks, *indices, *score_tensors), wanted)
        if checked.backend == "reference":
            return recomputed(again, Along(*along), more)
        backward = checked_backward(checked, again.deterministic)
        rows = Saved(q, k, v, out, lse, sinks)
        asked = Wanted(dsinks, tuple(dscore), apart=True)
        found = take_gradients(backward, again.sequence, rows, Along(*along), asked)
    others = [found.sinks if dsinks else None, *found.captured]
    return laid_like((*saved[:3], *more), [found.q, found.k, found.v, *(x for x in others if x is not None)])


def differentiate(call: Call, checked: CheckedCall, saved: Saved, along: Along) -> list[Tensor]:
    """Run the backward of a call by kernels, from the results of a forward, through its operator."""
    flops.tell_counters()
    captured = list(checked.mask.tensors), list(checked.score.tensors if checked.score else ())
    indices, text = list(call.sequence.indices().values()), program.write(call, checked, True)
    pair = [along.dout, torch.zeros_like(saved.lse) if along.dlse is None else along.dlse]
    rows = [saved.q, saved.k, saved.v, saved.out, saved.lse]
    wanted = [False] * (1 + len(indices) + len(captured[1]))
    return _attention_backward(pair, rows, saved.sinks, indices, *captured, text, wanted)


@_attention_backward.register_fake
def _fake_backward(
    along: list[Tensor],
    saved: list[Tensor],
    sinks: Tensor | None,
    indices: list[Tensor],
    mask_tensors: list[Tensor],
    score_tensors: list[Tensor],
    call: str,
    wanted: list[bool],
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (*saved[:3], *_chosen((sinks, *indices, *score_tensors), wanted))]


flops.register(torch.ops.warpattn.attention, torch.ops.warpattn.attention_backward)


@torch.library.custom_op("warpattn::refused_attention", mutates_args=())
def _refuse(q: Tensor, v: Tensor, reasons: str, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Raise the error of a call that breaks rules when the graph runs."""
    raise AttentionError(*ast.literal_eval(reasons))


@_refuse.register_fake
def _fake_refusal(q: Tensor, v: Tensor, reasons: str, return_lse: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], *v.shape[-1:])), _lse_like(q, return_lse and q.ndim in (3, 4))


def _leaves(tensors: list[Tensor], wanted: list[bool]) -> list[Tensor]:
    """Detach tensors; those in `wanted` require gradients."""
    return [x.detach().requires_grad_(want) for x, want in zip(tensors, wanted, strict=True)]


def _chosen(tensors: Many[Tensor | None], wanted: list[bool]) -> list[Tensor]:
    return [x for x, want in zip(tensors, wanted, strict=True) if want and x is not None]


def _run(call: Call) -> Result:
    """Run a call that requires no gradients."""
    return cast("Result", execute.attend(call))


def _called(
    operands: tuple[Tensor, ...],  # q, k, v
    sinks: Tensor | None,
    indices: list[Tensor],
    mask_tensors: list[Tensor],
    score_tensors: list[Tensor],
    text: str,
) -> Call:
    """Rebuild the call from an operator's arguments."""
    q, k, v = operands
    parsed = program.read(text, tuple(mask_tensors), tuple(score_tensors))
    tail = parsed.tail
    sequence = program.sequence_of(parsed.sequence, k, v, indices)
    options = (tail.scale, tail.return_lse, None, tail.backend, tail.deterministic)
    return Call(q, k, v, sequence, parsed.mask, parsed.score, sinks, *options)


def _lse_like(q: Tensor, wanted: bool) -> Tensor:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if not wanted:
        return q.new_empty(0, dtype=dtype)
    *batch, rows, heads = q.shape[:-1]  # ragged batches have no batch axis
    return q.new_empty((*batch, heads, rows), dtype=dtype)


def _split(listed: Many[Tensor], counts: Many[int]) -> list[list[Tensor]]:
    rest = iter(listed)
    return [[next(rest) for _ in range(count)] for count in counts]
