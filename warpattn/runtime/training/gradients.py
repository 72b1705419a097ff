"""Gradients of one call by kernels, from tensors that its forward saved and the gradients of its results.

Saved, Along ─┬─ CheckedBackward, Gradients ─▶ launches on a card or in the simulator ─▶ dq, dk, dv, dsinks
              └─ captured.py ─────────────────────────────────────────────────────────▶ gradients of captured tensors
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from warpattn.problem import CheckedCall
from warpattn.problem.backward import CheckedBackward, Gradients, fitted_gradients, without_tiles, write_back
from warpattn.problem.gradients import are_deterministic
from warpattn.runtime import cuda
from warpattn.runtime.bound_launches import launch_all
from warpattn.runtime.training import repeated
from warpattn.runtime.training.captured import captured_gradients
from warpattn.runtime.training.plan import list_backward_launches
from warpattn.sequences import Sequence
from warpattn.side_by_side import beside

NOTHING = contextlib.nullcontext()


class Saved(NamedTuple):
    """The forward's tensors that the backward needs, in the forward's shapes; lse is fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    sinks: Tensor | None


class Along(NamedTuple):
    """Gradients of the results out and lse; None is 0."""

    dout: Tensor | None
    dlse: Tensor | None


class Wanted(NamedTuple):
    """Gradients to take beside those of q, k and v: of the sinks, and of each tensor that the score captured.

    apart: no gradient shares memory with another, which operators must promise; else gradients of parts of one tensor
    are parts of one.
    """

    sinks: bool
    captured: tuple[bool, ...]
    apart: bool = False


class Found(NamedTuple):
    """Gradients in the shapes and dtypes of their tensors; None where none is required."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    captured: tuple[Tensor | None, ...]


def checked_backward(forward: CheckedCall, deterministic: bool | None) -> CheckedBackward:
    """Return the backward of a checked call; `deterministic` None: follow torch's switch."""
    arch = forward.backend.removeprefix("simulate:")
    return CheckedBackward.of(forward, are_deterministic(arch, deterministic))


def take_gradients(checked: CheckedBackward, sequence: Sequence, saved: Saved, along: Along, wanted: Wanted) -> Found:
    """Compute the gradients of sum(dout * out) + sum(dlse * lse), on torch's current stream of the operands' device."""
    dout = torch.zeros_like(saved.out) if along.dout is None else along.dout.detach()
    dlse = None if along.dlse is None else along.dlse.detach()
    q, k, v = saved.q, saved.k, saved.v
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v)) if wanted.apart else beside(q, k, v)
    x = Gradients(
        q,
        k,
        v,
        saved.out,
        lse=saved.lse.detach(),
        dout=dout,
        dlse=dlse,
        sinks=None if saved.sinks is None else saved.sinks.detach(),
        dq=dq,
        dk=dk,
        dv=dv,
        dsinks=torch.empty_like(saved.sinks, dtype=torch.float32) if wanted.sinks and saved.sinks is not None else None,
    )
    _run(checked, sequence, x)
    dsinks = None if x.dsinks is None or saved.sinks is None else x.dsinks.to(saved.sinks.dtype)
    captured: tuple[Tensor | None, ...] = (None,) * len(wanted.captured)
    if any(wanted.captured):
        captured = captured_gradients(checked, sequence, x, wanted.captured)
    return Found(x.dq, x.dk, x.dv, dsinks, captured)


def _run(checked: CheckedBackward, sequence: Sequence, x: Gradients) -> None:
    """Write dq, dk, dv and dsinks of `x`."""
    if x.q.numel() == 0 or x.k.numel() == 0:
        without_tiles(x)
    elif checked.forward.backend.startswith("simulate:"):
        from warpattn.runtime import simulate  # imports NumPy and Triton

        simulate.run_backward(checked, x, sequence)
    else:
        device = x.q.get_device()
        with NOTHING if cuda.current_device() == device else torch.cuda.device(device):
            if not repeated.launched_again(checked, sequence, x):
                _launch(checked, sequence, x, device)


def _launch(checked: CheckedBackward, sequence: Sequence, x: Gradients, device: int) -> None:
    """Launch, and keep the launches for the next call like this one."""
    fitting = fitted_gradients(x)
    bound = launch_all(list_backward_launches(checked, fitting, sequence), device)
    write_back(fitting, x)
    repeated.remember(checked, sequence, x, fitting, bound)
