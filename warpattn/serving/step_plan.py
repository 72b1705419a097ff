"""A plan for the steps of an engine: any mix of prompts and new tokens over a paged cache, up to fixed sizes.

    plan = wa.StepPlan(q, kv, seq, mask=wa.Causal())     the largest step: tokens, sequences, pages of a sequence
    out = plan(q, kv, seq)                               a step of at most that size: writes addresses and one number

    plan.update(cu_q, lengths, block_table)              or: copies the step's indices into the plan's own tensors
    out = plan(q, plan.kv, plan.seq)                     may be captured; the graph serves every later `update`
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules, many
from warpattn.inputs import is_tensor, kind_of, of_type
from warpattn.language.traced import whole
from warpattn.masks import Mask
from warpattn.masks.base import in_order
from warpattn.problem import Call
from warpattn.problem.launch import MOST_DECODED, PlanOptions
from warpattn.problem.memory import overlap, overlaps_itself, overwrite, writing
from warpattn.problem.operands import ALIGNMENT
from warpattn.quantized import Quantized, result_dtype
from warpattn.runtime.bound_launches import BoundLaunches
from warpattn.runtime.captures import outside_captures, used_here
from warpattn.scores import Score
from warpattn.sequences import PagedKV, PagedRagged, Ragged, Sequence
from warpattn.sequences.latent_query import WITH_PARTS, LatentQuery
from warpattn.sequences.ragged import bounded, check_bounds, promised
from warpattn.serving.operators import break_graph
from warpattn.serving.plans import Result, ServingPlan, with_query_parts
from warpattn.serving.step_lists import StepLists, occasion

# Parameters that hold the number of sequences, in the kernels of Hopper, Blackwell and CDNA and in combining kernels.
BATCHES = ("shape.batch", "sequence_args.batch", "indices.batch", "again.indices.batch", "only.batch")


class StepPlan(ServingPlan):
    """Attention of ragged queries over a paged cache, planned for up to as many tokens and sequences as given.

    q (total_q, Hq, D), or a `Quantized` or `LatentQuery`, kv and seq are as for `attention_paged(q, kv, seq)`; their
    sizes are the largest of a step, their values are not read. `seq.max_q` promises an upper bound of a sequence's
    queries in every step. Keyword arguments are those of `attention_paged`. With `batch_invariant` a token's result has
    the same bits whatever else is in the step and however its sequence is cut into steps, at some cost in speed.
    Launches and their number never depend on lengths, so calls may be captured into CUDA graphs.

    decoded: a hint, an int from 0 to 16, the most queries of a sequence that Hopper's decode kernel takes, such as 1
    and the drafts of speculative decoding; the prefill kernel takes longer ones. Without it, decode takes as many as
    its narrowest tile holds, 8 rows of a group's heads. A promised `max_q` up to 16 comes first.

    workspace: a contiguous uint8 tensor on the card. Without it, Hopper's prefill converts 8-bit keys and values in
    each tile of queries, and fetches small pages one by one. With it, keys and values of a sequence that many of its
    queries see, at least `copied_queries`, are first copied into it in 16 bits and whole tiles, sequence after sequence
    as long as they fit, which is faster; docs/eight_bit.md has the rules, and `copied_queries` is None if no step has
    copies. Plans may share a workspace if their calls never overlap, so use one per stream. 512 MiB hold 131,072 keys
    and values of 8 heads with 128 columns.

    Raises AttentionError listing every broken rule; a plan copies nothing else, so tensors must be laid out for TMA as
    described in `warpattn.api`.
    """

    copied_queries: int | None = None

    def __init__(
        self,
        q: Tensor | Quantized | LatentQuery,
        kv: PagedKV,
        seq: Ragged,
        *,
        mask: Mask | None = None,
        score: Score | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        batch_invariant: bool = False,
        workspace: Tensor | None = None,
        decoded: int = 0,
    ) -> None:
        rules = Rules()
        rules.flag("batch_invariant", batch_invariant)
        few = whole(decoded, 0)
        fine = few is not None and few <= MOST_DECODED
        rules.require(fine, f"decoded is {kind_of(decoded)}", f"decoded must be an int from 0 to {MOST_DECODED}")
        fine = isinstance(kv, PagedKV) and isinstance(seq, Ragged)
        what = f"kv is {of_type(kv)} and seq {of_type(seq)}"
        rules.require(fine, what, "a StepPlan takes a PagedKV and a Ragged(cu_q)")
        rules.done()
        if workspace is not None:
            _check_workspace(workspace, q, kv)
        mask = in_order(mask, batch_invariant)
        self._like_own = kv, seq
        q, k, v, kv = with_query_parts(q, kv)
        call = Call(q, k, v, PagedRagged(kv, seq), mask, score, sinks, scale)
        # Engines keep a plan for each size of steps, and measure before how much memory their caches may have.
        options = PlanOptions(batch_invariant, copies=False, workspace=workspace, decoded=few or 0)
        super().__init__(call, options, read_values=False)
        del self.out  # callers give their own, or a call makes one
        self._rows, self._sequences, self._bounds = len(q), len(kv.lengths), promised(seq)

    @cached_property
    def seq(self) -> Ragged:
        """Offsets in the plan's own memory, see `update`."""
        _, seq = self._like_own
        return replace(seq, cu_q=_own("seq.cu_q", seq.cu_q))

    @cached_property
    def kv(self) -> PagedKV:
        """The pages, and lengths and table in the plan's own memory, see `update`."""
        kv, _ = self._like_own
        own = {"block_table": kv.block_table, "lengths": kv.lengths}
        return kv.with_fields(**{name: _own(f"kv.{name}", x) for name, x in own.items()})

    @cached_property
    def _storages(self) -> frozenset[int]:
        """Addresses of the memory of the plan's own indices."""
        own = self.seq.cu_q, self.kv.lengths, self.kv.block_table
        return frozenset(x.untyped_storage().data_ptr() for x in own)

    def _outside(self, x: Tensor) -> Tensor:
        """Return a step's tensor, or a copy of a view of the plan's own, which the step overwrites."""
        return x.clone() if x.untyped_storage().data_ptr() in self._storages else x

    def _bind(self, call: Call, *others: Any) -> BoundLaunches:
        bound = super()._bind(call, *others)
        self._batch = [cell for name in BATCHES for cell in bound.cells(name)]
        names, after = [launch.name for launch in bound.each], 0
        if "sm90.places" in names:
            after = max(i for i, name in enumerate(names) if name == "sm90.order")  # begins the prefill over pages
            (least,), self._copied = bound.cells("shape.least"), bound.each[after].cell("only.copied")
            self.copied_queries = least.value
        self._launched = {  # by whether keys are copied, and whether the lists serve
            (first == 0, listed): [launch.call for launch in bound.each[first:] if not (listed and launch.per_step)]
            for first in (0, after) for listed in (False, True)
        }  # fmt: skip
        self._lists = StepLists() if any(launch.per_step for launch in bound.each) else None
        return bound

    def _choose_launches(self, kv: PagedKV, seq: Ragged, step: object, bound: BoundLaunches) -> None:
        """Write the number of sequences. Leave out what makes lists that the step has already, and what concerns copies
        of keys in a step whose sequences have too few queries for them. The prefill over pages then attends for all
        sequences, so a `max_q` that is too low does no harm."""
        for cell in self._batch:
            cell.value = len(kv.lengths)
        least = self.copied_queries
        copied = least is None or not isinstance(seq.max_q, int) or seq.max_q >= least
        if least is not None:
            self._copied.value = -1 if copied else 0
        listed = False
        if self._lists is not None:
            listed = self._lists.serve(occasion(step, bound.device, kv, seq, copied), kv.k_pages)
        bound.calls = self._launched[copied, listed]

    def __call__(
        self, q: Tensor | Quantized | LatentQuery, kv: PagedKV, seq: Ragged, out: Tensor | None = None,
        sinks: Tensor | None = None, *, step: object = None,
    ) -> Result:  # fmt: skip
        """Return out (total_q, Hq, Dv), the given one or a new one; `sinks` replaces the plan's.

        q has at most the plan's rows, kv and seq at most its sequences; rows after cu_q[-1] are padding and not
        written. A `seq.max_q` below `copied_queries` saves launches. Pages, strides and dtypes must be the plan's; an
        AttentionError names the first tensor that differs.

        step: any object that stands for this step, such as an engine's metadata. Layers that give the same object, one
        after the other, share the lists that Hopper's prefill attends by: only the first of them launches what makes
        these. You promise that between these calls `cu_q`, `kv.lengths` and tensors that the mask captured do not
        change, and no CUDA graph with calls of this plan is replayed; if the promise is broken, results are silently
        wrong. A layer whose pages were attended before begins a step anew, and so does another stream or the capture
        of a CUDA graph.
        """
        break_graph()
        if not isinstance(kv, PagedKV) or not isinstance(seq, Ragged):
            raise AttentionError("a StepPlan takes a PagedKV and a Ragged(cu_q)")
        if isinstance(q, WITH_PARTS):
            q, _, _, kv = with_query_parts(q, kv)
        try:
            batch, rows, offsets, tables = len(kv.lengths), len(q), len(seq.cu_q), len(kv.block_table)
        except (RuntimeError, TypeError):
            what = ", ".join(kind_of(x) for x in (q, kv.lengths, seq.cu_q, kv.block_table))
            rule = "they must be tensors with dimensions"
            raise AttentionError(f"q, kv.lengths, seq.cu_q and kv.block_table are {what}; {rule}") from None
        if batch > self._sequences or rows > self._rows:
            rule = f"the plan was made for up to {self._sequences} and {self._rows}"
            raise AttentionError(f"the step has {many(batch, 'sequence')} and {many(rows, 'row')} of q; {rule}")
        if offsets != batch + 1 or tables != batch:
            rule = f"kv.lengths has {many(batch, 'sequence')}, so they must have {batch + 1} and {batch}"
            what = f"seq.cu_q has {many(offsets, 'offset')} and kv.block_table {many(tables, 'row')}"
            raise AttentionError(f"{what}; {rule}")
        if self._bounds:
            check_bounds(seq, self._bounds)
        tensors = (q, kv.k_pages, kv.v_pages, seq.cu_q, *kv.indices().values())
        try:
            return self._run(tensors, PagedRagged(kv, seq), out, sinks, partial(self._choose_launches, kv, seq, step))
        except BaseException:
            self._forget_lists()  # perhaps nothing was launched
            raise

    def _forget_lists(self) -> None:
        if self._bound is not None and self._lists is not None:
            self._lists.forget()

    def _refer(self, qkv: tuple[Tensor, ...], sequence: Sequence, tail: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Without the rows of padding, which the reference does not take, and with the plan's bound."""
        assert isinstance(sequence, PagedRagged)
        (q, k, v), kv, rows = qkv, sequence.kv, max(0, int(sequence.cu_q[-1]))
        of_rows = {"q_rope": kv.q_rope, "q_scale": None if kv.q_scale is None or kv.q_scale.ndim < 2 else kv.q_scale}
        kv = kv.with_fields(**{name: x[:rows] for name, x in of_rows.items() if x is not None})
        seq = bounded(sequence.queries, self._bounds)
        return super()._refer((q[:rows], k, v), replace(sequence, kv=kv, queries=seq), tail)

    def update(self, cu_q: Tensor, lengths: Tensor, block_table: Tensor) -> None:
        """Copy a step's indices, int32 on any device, into `plan.seq` and `plan.kv`; the plan's other sequences get no
        queries. They may be views of those tensors. Else nothing is allocated on a card, and nothing is read back; host
        tensors should be pinned."""
        break_graph()
        self._forget_lists()
        rules = Rules()
        named = {"cu_q": (cu_q, ("offsets",)), "lengths": (lengths, ("batch",)),
                 "block_table": (block_table, ("batch", "max_pages"))}  # fmt: skip
        for name, (x, axes) in named.items():
            if rules.tensor(name, x, *axes):
                rules.require(x.dtype == torch.int32, f"{name} has dtype {x.dtype}", "it must be torch.int32")
        rules.done()
        batch = len(lengths)
        given = {"cu_q": (cu_q, batch + 1), "lengths": (lengths, batch), "block_table": (block_table, batch)}
        for name, (x, rows) in given.items():
            if len(x) != rows:
                rules.add(f"{name} has {many(len(x), 'row')}", f"for {many(batch, 'sequence')} it must have {rows}")
        width = self.kv.block_table.shape[1]
        what = f"the step has {many(batch, 'sequence')} of up to {many(block_table.shape[-1], 'page')}"
        fits = batch <= self._sequences and block_table.shape[-1] <= width
        rules.require(fits, what, f"the plan was made for up to {self._sequences} of {width}")
        rules.done()
        own_q, own_lengths, table = self.seq.cu_q, self.kv.lengths, self.kv.block_table
        cu_q, lengths, block_table = map(self._outside, (cu_q, lengths, block_table))
        overwrite(own_q[: batch + 1], cu_q, non_blocking=True)
        overwrite(own_lengths[:batch], lengths, non_blocking=True)
        overwrite(table[:batch, : block_table.shape[1]], block_table, non_blocking=True)
        with writing(own_q), writing(own_lengths):
            own_q[batch + 1 :].copy_(own_q[batch : batch + 1].expand(len(own_q) - batch - 1))
            own_lengths[batch:].zero_()

    def _results(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the caller's output, or a new one."""
        if out is None:
            return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=result_dtype(q.dtype)), None
        result, lse = super()._results(q, k, v, out)
        if len(out) != len(q):
            raise AttentionError(f"out has {many(len(out), 'row')}; out must have as many as q, {len(q)}")
        return result, lse


def _own(name: str, x: Tensor) -> Tensor:
    """Return zeros with the strides of an index tensor that the plan was made for, as those of steps must be."""
    if overlaps_itself(x):
        rule = "steps write different numbers into the plan's own, so make the plan with a contiguous tensor"
        raise AttentionError(f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; {rule}")
    with outside_captures(x.device):
        own = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_()
    used_here(own)
    return own


def _check_workspace(workspace: object, q: object, kv: PagedKV) -> None:
    """Raise AttentionError unless kernels can copy keys and values into `workspace`."""
    rules = Rules()
    if rules.tensor("workspace", workspace, "bytes"):
        assert isinstance(workspace, Tensor)
        kind, strides, start = workspace.dtype, workspace.stride(), workspace.data_ptr()
        rules.require(kind == torch.uint8, f"workspace has dtype {kind}", "it must be torch.uint8")
        rules.require(workspace.is_contiguous(), f"workspace has strides {strides}", "it must be contiguous")
        device = getattr(kv.k_pages, "device", workspace.device)
        where = f"workspace is on {workspace.device} and kv.k_pages on {device}"
        rules.require(workspace.device == device, where, "they must be on one device")
        rule = f"it must start at a multiple of {ALIGNMENT} bytes"
        rules.require(start % ALIGNMENT == 0, f"workspace starts at {start}", rule)
        for name, x in {"q": getattr(q, "values", q), "kv.k_pages": kv.k_pages, "kv.v_pages": kv.v_pages}.items():
            shared = is_tensor(x) and overlap(workspace, x)
            rules.require(not shared, f"workspace shares memory with {name}", "steps overwrite it: it must be apart")
    rules.done()
