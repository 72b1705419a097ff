"""Plans for engines: made once, called every step. A call checks few rules, plans nothing and allocates nothing.

    plan = wa.DecodePlan(q, kv, mask=wa.Causal())      checks, compiles, allocates output and workspace
    out = plan(q, kv)                                  writes addresses, launches

A plan owns its output and its workspace: the next call overwrites the result of this one, and a plan must not run twice
at the same time (one per stream). All layers of a model should share a plan, which is a little faster. Calls may be
captured into CUDA graphs; lengths, offsets and tables are read on the device, so one graph serves every step. On the
CPU a plan runs the reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from warpattn.errors import AttentionError, Rules, many
from warpattn.inputs import of_type
from warpattn.masks import Mask
from warpattn.masks.base import in_order
from warpattn.problem import Call, CheckedCall, is_latent, validate
from warpattn.problem.gradients import differentiated, named_inputs, refuse_gradients, refuse_transforms
from warpattn.problem.launch import DEFAULT_OPTIONS, PlanOptions
from warpattn.problem.memory import apart, extent, overlap, overwrite
from warpattn.problem.operands import ALIGNMENT, RUN, Operands, addressable, captured, captured_values, whole_runs
from warpattn.quantized import Quantized, split
from warpattn.reference import reference
from warpattn.runtime import cuda
from warpattn.runtime.bound_launches import BoundLaunches
from warpattn.runtime.captures import outside_captures, used_here
from warpattn.runtime.launches import list_launches
from warpattn.scores import Score
from warpattn.sequences import Dense, PagedKV, PagedRagged, Ragged, Sequence
from warpattn.sequences.latent_query import WITH_PARTS, LatentQuery, check_once, parted
from warpattn.sequences.ragged import bounded, check_bounds, promised, with_parts
from warpattn.serving.operators import break_graph
from warpattn.serving.planned_tensors import check_like, like, refuse_other, rows_may_vary

Result = Tensor | tuple[Tensor, Tensor]
Pair = tuple[Tensor | Quantized, Tensor | Quantized]


def _check_gradients(named: Iterable[tuple[str, object]]) -> None:
    """Raise AttentionError if a result would need gradients."""
    rules = Rules()
    refuse_gradients(rules, differentiated(named), "a plan has no backward: run it under torch.no_grad()")
    rules.done()


def _refuse_copies(call: Call, out: Tensor) -> None:
    """Raise AttentionError for tensors that kernels do not read and write in place."""
    rules = Rules()
    named = [*call.sequence.operands(call.q, call.k, call.v).items(), ("the output", out)]  # q.rope: see `validate`
    for name, x in named:
        what = f"{name} has shape {tuple(x.shape)}, strides {x.stride()} at {x.data_ptr()}"
        rule = "a plan makes no copies: rows must start at multiples of 16 bytes"
        if x.shape[-1] % RUN:
            rule = f"a plan makes no copies: head dims must be multiples of {RUN}, next {whole_runs(x.shape[-1])}"
        rules.require(addressable(x), what, rule)
    if call.sinks is not None:
        fine = call.sinks.dtype == torch.float32 and call.sinks.is_contiguous()
        what = f"sinks has dtype {call.sinks.dtype} and strides {call.sinks.stride()}"
        rules.require(fine, what, "a plan makes no copies: sinks must be contiguous fp32")
    rules.done()


class ServingPlan:
    """The base class of plans: the checked call, output and LSE, the bound launches."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        rule = "it holds addresses of its own memory: make another one"
        raise AttentionError(f"{of_type(self)} is copied or pickled; {rule}")

    def __init__(self, call: Call, options: PlanOptions = DEFAULT_OPTIONS, read_values: bool = True) -> None:
        break_graph()
        checked = validate(call, read_values)
        _check_gradients(named_inputs(call, captured(checked)))
        q, exact = call.q, torch.float64 if call.q.dtype == torch.float64 else torch.float32
        self._tail: dict[str, Any] = {"mask": call.mask, "score": call.score, "sinks": call.sinks}
        self._tail |= {"scale": checked.scale, "dtype": exact}
        with outside_captures(q.device):
            self.out = q.new_empty((*q.shape[:-1], checked.problem.dim_v), dtype=checked.problem.dtype)
            self.lse = q.new_empty(checked.lse_shape, dtype=exact) if call.return_lse else None
        self._values = captured_values(captured(checked))  # the plan keeps the tensors, so addresses stay valid
        self._latent = is_latent(checked.problem)  # then v is a view of k
        self._keep_layout(call, options.workspace)
        launches = checked.backend != "reference" and checked.problem.seq_k > 0 and self.out.numel() > 0
        with outside_captures(q.device):
            self._bound = self._bind(call, checked, options, self.out) if launches else None
        used_here(self.out, self.lse, *(self._bound.workspace if self._bound is not None else ()))

    def _keep_layout(self, call: Call, workspace: Tensor | None) -> None:
        """Keep what the tensors of every step must have in common with these, and where the plan's own are."""
        held = (self.lse, call.sinks, workspace)
        self._lse_at, self._sinks_at, self._workspace_at = [0 if x is None else x.data_ptr() for x in held]
        self._like_sinks = None if call.sinks is None else like(call.sinks)
        operands, indices = call.sequence.operands(call.q, call.k, call.v), call.sequence.indices()
        rows_vary = isinstance(call.sequence, Ragged | PagedRagged)
        over_pages = isinstance(call.sequence, PagedRagged)  # the number of pages never varies
        self._names = (*operands, *indices)
        every = (*operands.values(), *indices.values())
        self._floats = tuple([at for at, x in enumerate(every) if x.is_floating_point()])
        self._workspace = workspace
        read = (*operands.values(), call.sinks, call.sequence.q_rope, self._workspace)
        self._written, self._read = extent(self.out), tuple([0 if x is None else extent(x) for x in read])
        self._like = (
            *(like(x, rows_vary and (x is call.q or not over_pages)) for x in operands.values()),
            *(like(x, rows_vary and rows_may_vary(call.sequence, name, x)) for name, x in indices.items()),
        )
        self._like_out = like(self.out, rows_vary)

    def _bind(self, call: Call, checked: CheckedCall, options: PlanOptions, out: Tensor) -> BoundLaunches:
        """Return the launches of the call, which write `out`."""
        _refuse_copies(call, out)
        operands, device = Operands(call.q, call.k, call.v, out, self.lse, call.sinks), call.q.get_device()
        with contextlib.nullcontext() if cuda.current_device() == device else torch.cuda.device(device):
            launches = list_launches(checked, operands, call.sequence, options)
            try:
                bound = BoundLaunches(launches, device)
                bound.follow_call(checked, operands, call.sequence)
                return bound
            except LookupError as error:
                rule = "each tensor must have memory of its own, offsets, lengths and tables without holes"
                raise AttentionError(f"the call cannot be planned: {error}; {rule}") from error

    def _run(
        self, tensors: tuple[Tensor, ...], sequence: Sequence, out: Tensor | None, sinks: Tensor | None = None,
        prepare: Callable[[BoundLaunches], None] | None = None,
    ) -> Result:  # fmt: skip
        """Run one step on (q, k, v, indices …); `sinks` replaces the plan's, `prepare` gets checked launches ready."""
        break_graph()
        check_like(self._names, tensors, self._like)
        q, k, v, *indices = tensors
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            self._refuse_gradients(tensors, {"sinks": sinks, "out": out})
        rope, given = sequence.q_rope, out is not None
        out, lse = self._results(q, k, v, out)
        sinks_at = self._sinks_at if sinks is None else self._address_of(sinks)
        q_at, k_at, v_at, out_at = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        rope_at = 0 if rope is None else rope.data_ptr()
        own = range(out_at, out_at + self._written)  # a plan's own output may be what its last call has returned
        if given or q_at in own or k_at in own or v_at in own:
            read_at = (q_at, k_at, v_at, sinks_at, rope_at, self._workspace_at)
            if not apart((out_at, self._written), read_at, self._read):
                self._check_apart(out, given, (q, k, v, self._tail["sinks"] if sinks is None else sinks, rope))
        if self._bound is None or not (out_at and k_at):  # empty tensors have no address
            return self._run_reference(tensors, sequence, (out, lse), sinks)
        if (q_at | k_at | v_at | out_at | rope_at) % ALIGNMENT:
            raise AttentionError("a tensor starts in between; a plan's tensors must start at multiples of 16 bytes")
        if self._latent and k_at != v_at:
            rule = "in latent attention values are the first columns of the keys"
            raise AttentionError(f"keys start at {k_at}, values at {v_at}; {rule}")
        if prepare is not None:
            prepare(self._bound)
        at = (q_at, k_at, v_at, out_at, self._lse_at, sinks_at, *[x.data_ptr() for x in indices])
        if cuda.current_device() == self._bound.device:
            self._bound(at, self._values)
        else:
            with torch.cuda.device(self._bound.device):
                self._bound(at, self._values)
        return out if lse is None else (out, lse)

    def _run_reference(
        self, tensors: tuple[Tensor, ...], sequence: Sequence, results: tuple[Tensor, Tensor | None],
        sinks: Tensor | None,
    ) -> Result:  # fmt: skip
        """Write the results of one step by the reference."""
        out, lse = results
        given = [("out", out, self._like_out), ("sinks", sinks, self._like_sinks)]
        for name, x, wanted in (*zip(self._names, tensors, self._like, strict=True), *given):
            if x is not None and wanted is not None:
                refuse_other(name, x, wanted)  # tensors on "meta" have the number of the CPU
        tail = self._tail if sinks is None else self._tail | {"sinks": sinks}
        result, found = self._refer(tensors[:3], sequence, tail)
        overwrite(out[: len(result)], result)
        if lse is not None:
            overwrite(lse, found)
        return out if lse is None else (out, lse)

    def _refer(self, qkv: tuple[Tensor, ...], sequence: Sequence, tail: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """(out, lse) by the reference."""
        q, k, v = qkv
        return reference(q, k, v, sequence=sequence, **tail)

    def _refuse_gradients(self, tensors: tuple[Tensor, ...], beside: dict[str, Tensor | None]) -> None:
        """AttentionError if a result would have to carry gradients of a step's tensors, or kernels their tangents."""
        every = [*[tensors[at] for at in self._floats], *beside.values()]
        required = any([getattr(x, "requires_grad", False) for x in every])
        dual = self._bound is not None and forward_ad._current_level >= 0
        named = [*zip(self._names, tensors, strict=True), *beside.items()] if required or dual else []
        if required:
            _check_gradients(named)
        if dual:
            rules = Rules()
            refuse_transforms(rules, named, 'a plan has no derivatives; attention has with backend="reference"')
            rules.done()

    def _address_of(self, sinks: Tensor) -> int:
        """Return the address of a step's own sinks; raises AttentionError unless they are like the plan's."""
        if self._like_sinks is None:
            raise AttentionError("sinks is given; the plan was made without")
        check_like(("sinks",), (sinks,), (self._like_sinks,))
        return sinks.data_ptr()

    def _results(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return output and LSE of a step: the plan's, or the caller's output after a check."""
        if out is None:
            return self.out, self.lse
        check_like(("out",), (out,), (self._like_out,))
        return out, self.lse

    def _check_apart(self, out: Tensor, given: bool, read: tuple[Tensor | None, ...]) -> None:
        """Raise AttentionError if the output, perhaps the caller's, shares memory with a tensor that is read."""
        what = "out" if given else "the plan's own output"
        for name, x in zip((*self._names[:3], "sinks", "q.rope", "workspace"), (*read, self._workspace), strict=True):
            if x is not None and overlap(out, x):
                raise AttentionError(f"{what} shares memory with {name}; others may still read what is written")


class DecodePlan(ServingPlan):
    """Attention of new tokens over a cache, planned for tensors like `q` and `kv`.

    q (B, S, Hq, D), perhaps a `Quantized` or a `LatentQuery`: S new tokens a sequence (1 to 16 run on the decode
    kernel, more on prefill). kv: pages as for `attention_paged`, or a pair of dense k (B, Sk, Hkv, D) and v (B, Sk,
    Hkv, Dv), each perhaps a `Quantized`. With `batch_invariant` a sequence's result has the same bits whatever else is
    in the batch, at some cost in speed.

    With `kv_ready_before_dependency` you promise that lengths, block table, tensors of masks, and all keys and values
    except the last S of a sequence (dense: the last S rows of k and v) were written before the preceding kernel on the
    stream began, as is true if that kernel appends the new tokens. The plan's kernel then reads older keys while the
    preceding one still runs (programmatic dependent launch; Hopper decode, see docs/kernels/sm90-decode.md). If the
    promise is broken, results are silently wrong. `cache_settled` is its former name and will go in the next release.

    Raises AttentionError listing every broken rule; a plan makes no copies, so tensors must be laid out for TMA as
    described in `warpattn.api`.
    """

    def __init__(
        self,
        q: Tensor | Quantized | LatentQuery,
        kv: PagedKV | Pair,
        *,
        mask: Mask | None = None,
        score: Score | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        return_lse: bool = False,
        batch_invariant: bool = False,
        kv_ready_before_dependency: bool = False,
        cache_settled: bool = False,
    ) -> None:
        rules = Rules()
        rules.flag("batch_invariant", batch_invariant)
        rules.flag("kv_ready_before_dependency", kv_ready_before_dependency)
        rules.flag("cache_settled", cache_settled)
        rules.done()
        q, k, v, sequence = _operands(q, kv)
        call = Call(q, k, v, sequence, mask, score, sinks, scale, return_lse)
        super().__init__(call, PlanOptions(batch_invariant, kv_ready_before_dependency or cache_settled))
        self._paged = isinstance(kv, PagedKV)

    def __call__(self, q: Tensor | Quantized | LatentQuery, kv: PagedKV | Pair, out: Tensor | None = None) -> Result:
        """Return out (B, S, Hq, Dv), the plan's own or the given one; with return_lse also lse (B, Hq, S).

        Shapes, strides and dtypes must be the plan's; an AttentionError names the first tensor that differs.
        """
        if type(kv) is PagedKV and self._paged and not isinstance(q, WITH_PARTS):
            return self._run((q, kv.k_pages, kv.v_pages, *kv.indices().values()), kv, out)
        q, k, v, sequence = _operands(q, kv)
        if self._paged != isinstance(sequence, PagedKV):
            rule = "a PagedKV" if self._paged else "a pair of dense k and v"
            raise AttentionError(f"kv is {of_type(kv)}; the plan was made for {rule}")
        return self._run((q, k, v, *sequence.indices().values()), sequence, out)


def _operands(
    q: Tensor | Quantized | LatentQuery, kv: PagedKV | Pair
) -> tuple[Tensor, Tensor, Tensor, PagedKV | Dense]:
    """Return queries, keys, values, and their layout with all scales."""
    if isinstance(kv, PagedKV):
        return with_query_parts(q, kv)
    if not isinstance(kv, tuple) or len(kv) != 2:
        raise AttentionError(f"kv is {of_type(kv)}; it must be a PagedKV or a pair of dense k and v")
    k, v = kv
    (rows, q_fields), (k, k_scale), (v, v_scale) = parted(q), split(k), split(v)
    return rows, k, v, Dense(k_scale, v_scale, **q_fields)


def with_query_parts(q: Tensor | Quantized | LatentQuery, kv: PagedKV) -> tuple[Tensor, Tensor, Tensor, PagedKV]:
    """Return queries, pages of keys, pages of values, and the cache with the queries' scale or rotary part."""
    rows, q_fields = parted(q)
    check_once("kv", kv, q_fields)
    return rows, kv.k_pages, kv.v_pages, kv.with_fields(**q_fields) if q_fields else kv


class PrefillPlan(ServingPlan):
    """Attention over sequences laid end to end, planned for up to as many rows as `q`, `k` and `v` have.

    Each of them may be a `Quantized`, and q a `LatentQuery`. The number of sequences, heads and head dims are fixed; a
    call may have fewer rows. max_q and max_k of `seq` hold for every call, which may give lower ones; `cu_k` is given
    in all calls or in none. Keyword arguments are those of `attention_varlen`. With `batch_invariant` a sequence's
    result has the same bits whatever else is in the batch, at some cost in speed. Raises AttentionError listing every
    broken rule.
    """

    def __init__(
        self,
        q: Tensor | Quantized | LatentQuery,
        k: Tensor | Quantized,
        v: Tensor | Quantized,
        seq: Ragged,
        *,
        mask: Mask | None = None,
        score: Score | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        return_lse: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        rules = Rules()
        rules.flag("batch_invariant", batch_invariant)
        rules.done()
        mask = in_order(mask, batch_invariant)
        rows, keys, values, seq = with_parts(q, k, v, seq)
        call = Call(rows, keys, values, seq, mask, score, sinks, scale, return_lse)
        super().__init__(call, PlanOptions(batch_invariant))
        self._rows, self._keys = rows.shape[0], keys.shape[0]
        self._bounds = promised(seq)

    def __call__(
        self, q: Tensor | Quantized | LatentQuery, k: Tensor | Quantized, v: Tensor | Quantized, seq: Ragged,
        out: Tensor | None = None,
    ) -> Result:  # fmt: skip
        """Return out (total_q, Hq, Dv), a view of the plan's own or the given one; with return_lse also lse."""
        rows, keys, values, seq = with_parts(q, k, v, seq)
        indices = seq.indices()
        if tuple(indices) != self._names[3:]:
            what = f"the call has {' and '.join(indices)}"
            raise AttentionError(f"{what}; the plan was made for {' and '.join(self._names[3:])}")
        check_bounds(seq, self._bounds)
        return self._run((rows, keys, values, *indices.values()), seq, out)

    def _refer(self, qkv: tuple[Tensor, ...], sequence: Sequence, tail: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """With the plan's bounds, which a call without its own promises, too."""
        assert isinstance(sequence, Ragged)
        return super()._refer(qkv, bounded(sequence, self._bounds), tail)

    def _results(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return as many rows of the plan's output as q has, or the caller's output."""
        rows, keys = q.shape[0], k.shape[0]
        if rows > self._rows or keys > self._keys:
            rule = f"the plan was made for up to {self._rows} and {self._keys}"
            raise AttentionError(f"q has {rows} and k {many(keys, 'row')}; {rule}")
        if v.shape[0] != keys:
            raise AttentionError(f"v has {many(v.shape[0], 'row')}; v must have as many as k, {keys}")
        result, lse = super()._results(q, k, v, out)
        if rows < self._rows:
            result = result[:rows] if out is None else result
            lse = None if lse is None else lse[:, :rows]
        if result.shape[0] != rows:
            raise AttentionError(f"out has {many(result.shape[0], 'row')}; out must have as many as q, {rows}")
        return result, lse
