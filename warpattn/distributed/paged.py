"""Decode over a cache whose pages several ranks hold: each attends to its own, then they exchange (out, lse) once.

    pages of a sequence     0 1 2 3 4 5 6 7     in turns of one page, 2 ranks
    rank 0                  0   2   4   6       its block table has these, its lengths count their keys
    rank 1                    1   3   5   7

All ranks have all queries and get the whole result. Work and memory grow evenly with the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple
from typing import cast as typed

import torch
import torch.distributed as dist
from torch import Tensor

from warpattn.distributed.agreement import agree, described
from warpattn.distributed.merge import exact_dtype, merged
from warpattn.distributed.place import Pages, PlacedMask, PlacedScore, depends_on
from warpattn.distributed.ranks import Ranks, ranks_of
from warpattn.errors import AttentionError, Rules, many
from warpattn.inputs import is_tensor, kind_of
from warpattn.language.traced import whole
from warpattn.masks import Causal, Full, Mask
from warpattn.problem import Call, validate
from warpattn.problem.backends import Backend
from warpattn.quantized import result_dtype
from warpattn.runtime import execute
from warpattn.runtime.merging.states import merge_states
from warpattn.scores import Score, chained
from warpattn.sequences import PagedKV
from warpattn.serving import DecodePlan

Result = Tensor | tuple[Tensor, Tensor]
OF_PAGES = ("k_pages", "v_pages", "k_scale", "v_scale")
AT_ONCE = 16  # the most that merge_states takes
POSITIONAL = ("q", "k", "q_lo", "q_hi", "len_q", "len_k")


@dataclass(frozen=True, eq=False)
class SharedPages:
    """This rank's part of a cache.

    pages: the rank's own pages, with the number of its keys of each sequence. lengths: int32 (B,), keys of each whole
    sequence. turn: how many neighbouring pages a rank holds; page p of a sequence is on rank
    p // turn % ranks.
    """

    pages: PagedKV
    lengths: Tensor
    turn: int = 1


def share_pages(kv: PagedKV, group: Any = None, turn: int = 1) -> SharedPages:
    """Return this rank's part of a cache whose table and lengths are those of whole sequences.

    Pages are not moved, so a rank needs memory for its own only; entries of the table for others are not read. Computes
    with torch on the tables' device, without synchronising. Raises AttentionError.
    """
    ranks = ranks_of(group)
    if not isinstance(kv, PagedKV):
        raise AttentionError(f"kv is {kind_of(kv)}; it must be a warpattn PagedKV of whole sequences")
    if whole(turn, 1) is None:
        raise AttentionError(f"turn is {kind_of(turn)}; it must be an int of at least 1")
    rules = Rules()
    kv.check_indices(rules, None)
    kv.check_pages(rules, None)
    rules.done()
    table, size = kv.block_table, kv.k_pages.shape[1]
    rounds = -(-table.shape[1] // (turn * ranks.size))  # turns of each rank, so that all have as many columns
    padded = torch.nn.functional.pad(table, (0, rounds * turn * ranks.size - table.shape[1]))
    mine = padded.unflatten(1, (rounds, ranks.size, turn))[:, :, ranks.rank].flatten(1)
    lengths = Pages.of(kv.lengths, turn * size, ranks, kv.lengths.device).keys_below(kv.lengths.long())
    own = kv.with_fields(block_table=mine, lengths=lengths.to(torch.int32), shared_pages=0)
    return SharedPages(own, kv.lengths, turn)


def paged_attention(
    q: Tensor,
    kv: SharedPages,
    *,
    group: Any = None,
    mask: Mask | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | Backend = "auto",
    same_bits: bool = False,
) -> Result:
    """Compute `attention_paged` over a cache that the ranks of `group` share.

    q (B, Sq, Hq, D): the newest Sq positions of each sequence, the same on every rank, whose keys are in the cache.
    kv: this rank's part, see `share_pages`. Masks, scores and sinks are those of whole sequences. There is no backward.

    same_bits: the result does not depend on the number of ranks or on other sequences of the batch. Each turn of pages
    is attended to separately, and turns are summed in one order; so choose turns of thousands of keys. Masks and scores
    must not depend on positions, except `Causal()` for one query.

    Returns out (B, Sq, Hq, Dv), with return_lse also lse (B, Hq, Sq), on every rank. Raises AttentionError, on every
    rank, for arguments that break a rule or differ between ranks.
    """
    ranks = ranks_of(group)
    given = Given(q, kv, mask, score, sinks, scale, backend)
    flags = {"same_bits": same_bits, "return_lse": return_lse}
    agree([ranks], described("paged_attention", given.told() | flags), lambda: _check(given, flags))
    failure: Exception | None = None
    with torch.no_grad():
        try:
            parts = _turns(given) if same_bits else _own(given, ranks)
        except Exception as error:
            if q.device.type != "cpu":
                raise
            failure, parts = error, _no_parts(given, same_bits)
        parts = _gathered(parts, ranks, failure)
        out, lse = merged(*parts, sinks) if same_bits else _merged(parts)
    out = out.to(result_dtype(q.dtype))
    return (out, lse) if return_lse else out


class Given(NamedTuple):
    """The arguments of a call."""

    q: Tensor
    kv: SharedPages
    mask: Mask | None
    score: Score | None
    sinks: Tensor | None
    scale: float | None
    backend: str | Backend

    def told(self) -> dict[str, Any]:
        """Return the arguments that must be equal on all ranks, and what a page is like; ranks may have other numbers
        of pages."""
        pages = getattr(self.kv, "pages", None)
        held = {each.name: getattr(pages, each.name) for each in fields(PagedKV)} if isinstance(pages, PagedKV) else {}
        held |= {name: _page_of(held[name], held["k_pages"]) for name in OF_PAGES if name in held}
        told = {"kv": None, "kv.turn": getattr(self.kv, "turn", None), "kv.lengths": getattr(self.kv, "lengths", None)}
        return self._asdict() | told | {f"kv.pages.{name}": value for name, value in held.items()}

    @property
    def seen(self) -> Mask:
        """The mask; for one query, the newest, `Causal` hides nothing."""
        mask = Full() if self.mask is None else self.mask
        return Full() if mask == Causal() and self.q.shape[1] == 1 else mask

    def is_placed(self, value: Mask | Score | None) -> bool:
        """Whether a mask or score depends on the positions of a rank's keys."""
        return value is not None and depends_on(value, *POSITIONAL) and value != Full()


def _page_of(x: Any, pages: Any) -> Any:
    """Describe one page of a tensor that has an entry for each of `pages`; return another value as it is."""
    if is_tensor(x) and is_tensor(pages) and x.ndim > 1 and x.shape[:1] == pages.shape[:1]:
        return f"a cache of {x.dtype} pages of shape {tuple(x.shape[1:])}"
    return x


class Parts(NamedTuple):
    """Results over disjoint keys: out (n, B, Sq, Hq, Dv) and lse (n, B, Hq, Sq)."""

    out: Tensor
    lse: Tensor


def _own(given: Given, ranks: Ranks) -> Parts:
    """Attend to this rank's pages; the first rank counts the sinks."""
    kv, mask, score = given.kv, given.seen, given.score
    added = mask.additive()
    score = chained(score, added)
    span = kv.turn * kv.pages.k_pages.shape[1]
    places = Pages.of(kv.lengths, span, ranks, given.q.device)
    mask = PlacedMask.of(mask, places) if added is not None or given.is_placed(mask) else mask
    score = PlacedScore.of(score, places) if score is not None and given.is_placed(score) else score
    name = given.backend.name if isinstance(given.backend, Backend) else given.backend
    pages, sinks = kv.pages, None if ranks.rank else given.sinks
    call = Call(given.q, pages.k_pages, pages.v_pages, pages, mask, score, sinks, given.scale, True, backend=name)
    out, lse = typed("tuple[Tensor, Tensor]", execute.attend(call))
    return Parts(out[None], lse[None])


def _turns(given: Given) -> Parts:
    """Attend to each turn of this rank's pages as a separate sequence."""
    q, pages, turn = given.q, given.kv.pages, given.kv.turn
    batch, count, span = len(q), pages.block_table.shape[1] // turn, turn * pages.k_pages.shape[1]
    first = torch.arange(count, device=q.device, dtype=torch.int32) * span
    lengths = (pages.lengths[:, None] - first).clamp(0, span).to(torch.int32)  # [B, count]
    table = pages.block_table.reshape(batch * count, turn)
    q_scale = pages.q_scale
    if q_scale is not None and q_scale.ndim > 1:
        q_scale = q_scale.repeat_interleave(count, 0)
    rope = None if pages.q_rope is None else pages.q_rope.repeat_interleave(count, 0)
    each = pages.with_fields(block_table=table, lengths=lengths.flatten(), q_scale=q_scale, q_rope=rope)
    queries = q.repeat_interleave(count, 0)
    options = {"mask": given.seen, "score": given.score, "scale": given.scale}
    plan = DecodePlan(queries, each, return_lse=True, batch_invariant=True, **options)
    out, lse = typed("tuple[Tensor, Tensor]", plan(queries, each))
    return Parts(*(x.unflatten(0, (batch, count)).transpose(0, 1) for x in (out, lse)))


def _no_parts(given: Given, same_bits: bool) -> Parts:
    """Return what a rank sends in the place of its parts if it has failed."""
    (batch, rows, heads, _), pages = given.q.shape, given.kv.pages
    count = pages.block_table.shape[1] // given.kv.turn if same_bits else 1
    out = given.q.new_zeros((count, batch, rows, heads, pages.v_pages.shape[-1]), dtype=exact_dtype(given.q.dtype))
    return Parts(out, out[..., 0].mT)


def _gathered(parts: Parts, ranks: Ranks, failure: Exception | None) -> Parts:
    """Gather the parts of all ranks in the order of the keys' turns, by one exchange.

    On CPUs, where calls read tables and lengths, a column beside them says whether their rank has failed. Then it
    raises its `failure`, and the others an AttentionError that names it.
    """
    exact, on_cpu = parts.lse.dtype, parts.lse.device.type == "cpu"
    lse = parts.lse.mT[..., None]
    columns = [parts.out.to(exact), lse, *([torch.full_like(lse, float(failure is not None))] if on_cpu else [])]
    packed = torch.cat(columns, -1).contiguous()
    told = [torch.empty_like(packed) for _ in range(ranks.size)]
    dist.all_gather(told, packed, group=ranks.group)
    if failure is not None:
        raise failure
    if on_cpu:
        names = zip(dist.get_process_group_ranks(ranks.group), told, strict=True)
        failed = [f"rank {rank} has failed; its own message says more" for rank, x in names if x[..., -1].any()]
        if failed:
            raise AttentionError(*failed)
    every, dim_v = torch.stack(told, 1).flatten(0, 1), parts.out.shape[-1]
    return Parts(every[..., :dim_v], every[..., dim_v].mT)


def _merged(parts: Parts) -> tuple[Tensor, Tensor]:
    """Merge all parts with as few launches as possible."""
    pairs = list(zip(*parts, strict=True))
    while len(pairs) > 1:
        pairs = [merge_states(pairs[i : i + AT_ONCE]) for i in range(0, len(pairs), AT_ONCE)]
    return pairs[0]


def _check(given: Given, flags: dict[str, bool]) -> None:
    """Check the rules that the call on this rank's pages does not check."""
    rules, kv = Rules(), given.kv
    for name, flag in flags.items():
        rules.flag(name, flag)
    if not rules.require(isinstance(kv, SharedPages), f"kv is {kind_of(kv)}", "it must be what share_pages returns"):
        rules.done()
    q, pages = given.q, kv.pages
    if not rules.require(isinstance(pages, PagedKV), f"kv.pages is {kind_of(pages)}", "it must be a warpattn PagedKV"):
        rules.done()
    rules.tensor("q", q, "batch", "seq", "heads", "head_dim")
    pages.check_indices(rules, None)
    for name, kind in (("mask", Mask), ("score", Score)):
        x = getattr(given, name)
        rule = f"it must be a warpattn {kind.__name__}"
        rules.require(x is None or isinstance(x, kind), f"{name} is {kind_of(x)}", rule)
    rules.done()
    fine = is_tensor(kv.lengths) and kv.lengths.dtype == torch.int32 and kv.lengths.shape == q.shape[:1]
    rules.require(fine, f"kv.lengths is {kind_of(kv.lengths)}", f"it must be an int32 tensor ({len(q)},)")
    rules.require(whole(kv.turn, 1) is not None, f"kv.turn is {kind_of(kv.turn)}", "it must be an int of at least 1")
    rules.done()
    columns = pages.block_table.shape[1]
    what = f"kv.pages.block_table has {many(columns, 'column')}"
    rules.require(columns % kv.turn == 0, what, f"turns have {kv.turn} pages")
    if flags["same_bits"]:
        looks = given.is_placed(given.seen) or depends_on(given.seen, "b") or given.seen.additive() is not None
        scored = given.score is not None and (given.is_placed(given.score) or depends_on(given.score, "b"))
        rule = "with same_bits neither mask nor score may look at positions or sequences"
        rules.require(not looks, f"mask is {kind_of(given.mask)}", f"{rule}; Causal() is fine for one query")
        rules.require(not scored, f"score is {kind_of(given.score)}", rule)
        rules.require(given.backend == "auto", f"backend is {given.backend!r}", 'with same_bits it must be "auto"')
    call = Call(q, pages.k_pages, pages.v_pages, pages, None, None, given.sinks, given.scale)
    try:
        validate(call)
    except AttentionError as error:
        rules.broken.extend(error.reasons)
    rules.done()
