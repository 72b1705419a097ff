"""merge_states: combines results over parts of the keys into the result over all of them.

    lse = log Σ exp(lse_i)        out = Σ exp(lse_i - lse) · out_i

It uses torch operations on the CPU and where gradients flow, and one launch on a card.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules, many
from warpattn.inputs import kind_of, of_type
from warpattn.kernels.merge.launch import Result, merge_launches
from warpattn.problem.backends import USE_REFERENCE, Backend
from warpattn.problem.memory import overlap, overlaps_itself, overwrite
from warpattn.problem.operands import ALIGNMENT
from warpattn.problem.rules import choose_backend, is_differentiated
from warpattn.runtime.repeated_calls import RepeatedCalls
from warpattn.torch_modes import is_fake, is_recorded

AXES = {4: ("batch", "seq", "heads", "head_dim"), 3: ("total", "heads", "head_dim")}
LSE_AXES = {4: ("batch", "heads", "seq"), 3: ("heads", "total")}
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*KERNEL_DTYPES, torch.float64)
MOST = 16

_calls = RepeatedCalls("merge_states", rows=0)


def merge_states(
    *states: Tensor | Sequence[tuple[Tensor, Tensor]], out: Tensor | None = None, backend: str | Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Merge results of the same queries over different keys: merge_states(out_a, lse_a, out_b, lse_b, …), or a list of
    up to 16 pairs (out, lse).

    Each pair is what `attention` and its siblings return with `return_lse`: out (B, Sq, Hq, Dv) with lse (B, Hq, Sq),
    or (total_q, Hq, Dv) with (Hq, total_q); fp16, bf16, fp32 or fp64, lse fp32 (fp64 with fp64). Give sinks to one of
    the calls only, or they count more than once. Where a row's lse is -inf it saw no key, and that pair's out is
    ignored; if all are -inf the result is 0 and -inf. NaN in an lse gives NaN in both.

    `out` receives the merged output and must share no memory with the inputs. backend: as for `attention`; "auto" runs
    torch's operations on the CPU, for fp64 and where gradients flow, and one launch on cards with kernels. Graphs of
    torch.compile and `make_fx` hold only torch's operations, so there it must be "auto" or "reference".

    Returns (out, lse) in the shapes and dtypes given. Raises AttentionError listing every broken rule.
    """
    results = _pairs(states)
    backend = backend.name if isinstance(backend, Backend) else backend
    if torch.compiler.is_compiling():
        _check_traced(results, out, backend)
        merged = _refer(results)
        return merged if out is None else (out.copy_(merged.out), merged.lse)
    rules = Rules()
    named = _named(results)
    like = _check(rules, named)
    if like is not None:
        _check_out(rules, like, named, out)
    chosen = _backend(rules, backend, results[0].out, is_differentiated([x for _, x in named]))
    rules.done()
    if chosen == "reference" or results[0].out.numel() == 0:
        merged = _refer(results)
        return merged if out is None else (overwrite(out, merged.out), merged.lse)
    x = results[0]
    merged = Result(torch.empty_like(x.out, memory_format=torch.contiguous_format) if out is None else out,
                    torch.empty_like(x.lse, memory_format=torch.contiguous_format))  # fmt: skip
    merge_into(merged, results, backend=str(chosen))
    return merged


def merge_into(merged: Result, results: Sequence[Result], limit: Tensor | None = None, backend: str = "auto") -> None:
    """Merge checked results with the kernel. limit: int32, one element: how many rows of (total_q, …) to merge; others
    are not written."""
    tensors = (*merged, *(x for result in results for x in result), limit)
    if backend.startswith("simulate:"):
        from warpattn.runtime import simulate  # imports NumPy and Triton

        (launch,) = merge_launches(backend.removeprefix("simulate:"), _packed(results), merged, limit)
        simulate.run_alone(launch)
        return
    aligned = all(x.data_ptr() % ALIGNMENT == 0 for x in (merged.out, *(result.out for result in results)))
    if not _calls.launched_again(tensors, aligned):
        _calls.launch(tensors, aligned, lambda arch: merge_launches(arch, _packed(results), merged, limit))


def _packed(results: Sequence[Result]) -> list[Result]:
    """Return the results as the kernel reads them: with a last stride of 1, in copies if need be."""
    return [Result(x.out if x.out.stride(-1) == 1 else x.out.contiguous(), x.lse) for x in results]


def _pairs(states: Sequence[object]) -> list[Result]:
    """Return the pairs of out and lse in either form of the arguments."""
    rule = "give out_a, lse_a, out_b, lse_b, … or one list of pairs (out, lse)"
    if len(states) == 1 and not isinstance(states[0], Tensor):
        listed = states[0]
        fine = isinstance(listed, list | tuple) and all(isinstance(x, list | tuple) and len(x) == 2 for x in listed)
        if not fine:
            raise AttentionError(f"states is {of_type(listed)} of something else; {rule}")
        pairs = [Result(*pair) for pair in listed]  # pyright: ignore[reportGeneralTypeIssues]
    else:
        if len(states) % 2:
            raise AttentionError(f"the call has {many(len(states), 'tensor')}; {rule}")
        pairs = [Result(*states[i : i + 2]) for i in range(0, len(states), 2)]  # pyright: ignore[reportArgumentType]
    if not 1 <= len(pairs) <= MOST:
        raise AttentionError(f"there are {len(pairs)} pairs of out and lse; there must be 1 to {MOST}")
    return pairs


def _named(results: list[Result]) -> list[tuple[str, Tensor]]:
    """Every tensor with its name: out_a, lse_a, out_b, …"""
    letters = [chr(ord("a") + i) for i in range(len(results))]
    named = zip(letters, results, strict=True)
    return [(f"{kind}_{letter}", x) for letter, result in named for kind, x in result._asdict().items()]


def _check(rules: Rules, named: list[tuple[str, Tensor]]) -> Tensor | None:
    """Check the tensors to merge; return the first output if all ranks are right."""
    _, like = named[0]
    rank = like.ndim if isinstance(like, Tensor) and like.ndim in AXES else 4
    fine = [rules.tensor(name, x, *(LSE_AXES if i % 2 else AXES)[rank]) for i, (name, x) in enumerate(named)]
    if not all(fine):
        return None
    listed = " or ".join(str(dtype) for dtype in DTYPES)
    rules.require(like.dtype in DTYPES, f"out_a has dtype {like.dtype}", f"it must be {listed}")
    shapes, dtypes = _alike(like)
    for i, (name, x) in enumerate(named):
        what, other = f"{name} has shape {tuple(x.shape)}", shapes[i % 2]
        rules.require(tuple(x.shape) == other, what, f"it must be {other}, by the shape of out_a")
        rules.require(x.dtype == dtypes[i % 2], f"{name} has dtype {x.dtype}", f"it must be {dtypes[i % 2]}")
        rules.require(x.device == like.device, f"{name} is on {x.device}", f"it must be on {like.device} as out_a is")
    return like


def _alike(like: Tensor) -> tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]:
    """Return the shapes and the dtypes of all outputs and of all LSEs, by the first output."""
    *outer, heads, _ = like.shape
    shapes = (tuple(like.shape), (heads, *outer) if like.ndim == 3 else (outer[0], heads, outer[1]))
    return shapes, (like.dtype, torch.float64 if like.dtype == torch.float64 else torch.float32)


def _check_traced(results: list[Result], out: Tensor | None, backend: object) -> None:
    """Check what torch.compile knows. Sentences have no sizes: torch drops those with one that a graph keeps open."""
    if backend not in ("auto", "reference"):
        rule = 'a graph of torch.compile merges with torch\'s operations, so it must be "auto" or "reference"'
        raise AttentionError(f"backend is {backend!r}; {rule}")
    like, given = results[0].out, [] if out is None else [("out", out)]
    if not isinstance(like, Tensor) or like.ndim not in AXES or like.dtype not in DTYPES:
        listed = " or ".join(str(dtype) for dtype in DTYPES)
        raise AttentionError(f"out_a is {_kind(like)}; it must be a tensor of rank 3 or 4 and {listed}")
    shapes, dtypes = _alike(like)
    for name, x in [*_named(results), *given]:
        lse = name.startswith("lse")
        shape, dtype, axes = shapes[lse], dtypes[lse], (LSE_AXES if lse else AXES)[like.ndim]
        if not isinstance(x, Tensor) or tuple(x.shape) != shape or x.dtype != dtype or x.device != like.device:
            rule = f"by out_a it must be a {dtype} tensor of shape ({', '.join(axes)}) on {like.device}"
            raise AttentionError(f"{name} is {_kind(x)}; {rule}")
    if given and torch.is_grad_enabled() and any(x.requires_grad for _, x in [*_named(results), *given]):
        raise AttentionError("out is given; there is no gradient through it; leave it out or use torch.no_grad()")


def _kind(x: object) -> str:
    """Describe a traced value without sizes."""
    if isinstance(x, Tensor):
        return f"a {x.dtype} tensor of rank {x.ndim} on {x.device}"
    return of_type(x)


def _check_out(rules: Rules, like: Tensor, named: list[tuple[str, Tensor]], out: Tensor | None) -> None:
    """Check `out`."""
    if out is None or not rules.tensor("out", out, *AXES[like.ndim]):
        return
    same = out.shape == like.shape and out.dtype == like.dtype and out.device == like.device
    what = f"out has shape {tuple(out.shape)} and {out.dtype} on {out.device}"
    rules.require(same, what, f"it must be as out_a: {tuple(like.shape)} and {like.dtype} on {like.device}")
    packed = out.stride(-1) == 1 or out.shape[-1] <= 1
    rules.require(packed, f"out has strides {out.stride()}", "the last stride must be 1")
    what = f"out has shape {tuple(out.shape)} and strides {out.stride()}"
    rules.require(not overlaps_itself(out), what, "each of its elements must have its own place in memory")
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (out, *(x for _, x in named)))
    rules.require(not grad, "out is given", "there is no gradient through it; leave it out or use torch.no_grad()")
    for name, x in named:
        rules.require(not overlap(out, x), f"out shares memory with {name}", "it must have memory of its own")


def _backend(rules: Rules, backend: str, like: Tensor, differentiated: bool) -> str | None:
    """Return the backend to run, "reference" for torch operations."""
    with_torch = differentiated or (isinstance(like, Tensor) and like.dtype not in KERNEL_DTYPES)
    recorded = is_recorded() or is_fake(like)
    if isinstance(backend, str) and backend == "auto" and (with_torch or recorded):
        return "reference"
    chosen = choose_backend(rules, backend, like, "out_a")
    if chosen != "reference":
        what = f"backend is {kind_of(backend)}"
        rules.require(not differentiated, what, f"its merge has no backward; {USE_REFERENCE}")
        rules.require(not recorded, what, f"torch records operations and would miss its launch; {USE_REFERENCE}")
        what = f"out_a has dtype {getattr(like, 'dtype', None)}"
        rules.require(not with_torch or differentiated, what, f"kernels merge fp16, bf16 and fp32; {USE_REFERENCE}")
    return chosen


def _refer(results: Sequence[Result]) -> Result:
    """Merge with torch operations, in fp32 (fp64 for fp64)."""
    exact = results[0].lse.dtype
    lses = torch.stack([result.lse for result in results])
    top = lses.detach().amax(0)
    shift = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(lses - shift)
    total = weights.sum(0)
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    merged = torch.zeros_like(results[0].out, dtype=exact)
    for result, weight in zip(results, weights, strict=True):
        unseen, share = (x.transpose(-1, -2)[..., None] for x in (result.lse == -torch.inf, weight / safe))
        merged = merged + share * result.out.to(exact).masked_fill(unseen, 0.0)
    lse = (shift + torch.log(safe)).masked_fill(empty, -torch.inf)
    return Result(merged.to(results[0].out.dtype), lse)
