"""The specification in code: attention on any device with torch alone, tile by tile.

For each sequence the queries are cut into row tiles. A mask says which keys a tile can see (`kv_span`): hidden ranges
are skipped and the range that every row sees needs no mask; what remains is evaluated key by key:

        keys   0      first      full_lo      full_hi      last     len_k
               |-skip-|--masked--|---no mask---|--masked----|--skip--|

The softmax is online (running maximum, sum and output; Milakov and Gimelshein, arXiv 1805.02867): memory grows with the
tile, not with Sq x Sk. Gradients flow to q, k, v, sinks and captured float tensors; the backward of a long sequence
recomputes one row tile at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from warpattn.errors import Rules
from warpattn.language.evaluate import evaluate
from warpattn.masks import Full, Mask, MaskProgram
from warpattn.scores import Score, ScoreProgram, chained
from warpattn.sequences import Dense, Sequence, Sizes
from warpattn.torch_modes import without_autocast

Operands = tuple[Tensor, Tensor, Tensor]  # q, k, v

TILE_KEYS = 512
TILE_SCORES = 1 << 20  # scores of one tile over all heads: 4 MiB in fp32
RECOMPUTE_FROM = 1 << 22  # scores of one sequence from which the backward recomputes row tiles instead of keeping them


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sequence: Sequence = Dense(),  # noqa: B008 (frozen, holds nothing)
    mask: Mask | None = None,
    score: Score | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention computed in `dtype` (fp32 or fp64) for operands of any dtype.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv) with any strides; ragged: (total, heads, dim); paged: q as
    dense, and k, v are ignored because `PagedKV` carries them. sinks: (Hq,) logits, each counted once per row. scale:
    1/sqrt(D) by default. Query row i of a sequence sits at key position i + len_k - len_q.

    Returns out (B, Sq, Hq, Dv), or (total_q, Hq, Dv), and lse (B, Hq, Sq), or (Hq, total_q), both in `dtype`. lse is
    the natural log of the whole denominator, sinks included. A row that sees no key gives 0 and -inf (with sinks 0 and
    the sink). Raises AttentionError for shapes, offsets or page tables out of range; `attention` and its siblings check
    the rest.
    """
    rules = Rules()
    sizes = sequence.sizes(q, k, v) if sequence.check(rules, q, k, v) and not rules.broken else None
    if sizes is not None:
        sequence.check_values(rules, sizes)
    rules.done()
    mask = Full() if mask is None else mask
    score = chained(score, mask.additive())
    if sizes is not None and not (sizes.batch and sizes.heads_q):
        tensors = [] if score is None else score.program().tensors
        return _tied(_nothing(sequence, sizes, (q, k, v), dtype), tensors if sinks is None else (*tensors, sinks))
    job = Job(
        mask=mask.program(),
        score=None if score is None else score.program(),
        sinks=None if sinks is None else sinks.to(dtype),
        scale=sequence.query_columns(q) ** -0.5 if scale is None else scale,
        dtype=dtype,
    )
    q, k, v = _exact(sequence, (q, k, v), dtype) if torch.is_grad_enabled() else (q, k, v)
    with without_autocast(q.device):
        results = [job.attend(b, *tensors) for b, tensors in enumerate(sequence.walk(q, k, v))]
        joined = sequence.join([out for out, _ in results], [lse for _, lse in results])
    return joined if job.score is None else _tied(joined, job.score.tensors)


def _tied(results: tuple[Tensor, Tensor], tensors: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Results as functions of `tensors` also where nothing has read them: then their gradients are 0, not absent."""
    wanted = [x for x in tensors if x.requires_grad] if torch.is_grad_enabled() else []
    if not wanted:
        return results
    out, lse = results
    tie = sum([(x[:0] if x.ndim else x.expand(0)).to(lse.dtype).sum() for x in wanted])
    return out + tie, lse + tie


def _exact(sequence: Sequence, operands: Operands, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield operands in `dtype` where gradients are wanted, before the batch is taken apart: the backward of that joins
    tensors, which a region of torch.autocast refuses for 16-bit tensors of another type."""
    rope = sequence.q_rope
    for x, beside in zip(operands, (rope, None, None), strict=True):
        yield x.to(dtype) if x.requires_grad or (beside is not None and beside.requires_grad) else x


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of matrices [N, L, M] and [N, M, K], whose gradients, too, have the dtype of the operands in a region of
    torch.autocast."""
    wanted = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    return _Product.apply(a, b) if wanted else a @ b


class _Product(torch.autograd.Function):
    """The product, and its derivatives of every kind by products again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        (a, b), (for_a, for_b) = inputs, ctx.needs_input_grad
        ctx.save_for_backward(a if for_b else None, b if for_a else None)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        with without_autocast(along.device):
            return None if b is None else product(along, b.mT), None if a is None else product(a.mT, along)

    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None) -> Tensor | None:
        a, b = ctx.saved_tensors
        parts = [product(x, y) for x, y in ((da, b), (a, db)) if x is not None and y is not None]
        return sum(parts[1:], parts[0]) if parts else None


def _nothing(sequence: Sequence, sizes: Sizes, given: Operands, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Results of a batch without sequences or heads: empty, and still a function of q, k and v."""
    q, *_ = operands = (*sequence.operands(*given).values(), *([] if sequence.q_rope is None else [sequence.q_rope]))
    tie = sum([x[:0].to(dtype).sum() for x in operands])
    out = q.new_zeros((*q.shape[:-1], sizes.dim_v), dtype=dtype)
    return out + tie, q.new_zeros(sequence.lse_shape(sizes), dtype=dtype) + tie


@dataclass(frozen=True, eq=False)
class Job:
    """The arguments that all sequences of a call share."""

    mask: MaskProgram
    score: ScoreProgram | None
    sinks: Tensor | None  # [Hq]
    scale: float
    dtype: torch.dtype

    def attend(self, b: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attend one sequence: q (Sq, Hq, D), k (Sk, Hkv, D), v (Sk, Hkv, Dv) to out (Sq, Hq, Dv), lse (Hq, Sq)."""
        len_q, heads_q, _ = q.shape
        heads_kv = k.shape[1]
        q = q.to(self.dtype).transpose(0, 1).unflatten(0, (heads_kv, -1))  # [Hkv, G, Sq, D]
        keys = finite_part(k.to(self.dtype).permute(1, 2, 0))  # [Hkv, D, Sk]
        values = finite_part(v.to(self.dtype).transpose(0, 1).contiguous())  # [Hkv, Sk, Dv]
        where = Place(b, len_q, values.finite.shape[1], heads_q, q.device)
        recompute = torch.is_grad_enabled() and heads_q * len_q * where.len_k >= RECOMPUTE_FROM
        outs, lses = [], []
        for (start, stop), span in zip(where.row_tiles(), self.spans(where), strict=True):
            args = (where, start, span, q[:, :, start:stop], keys, values)
            if recompute:
                out, lse = checkpoint(self.row_tile, *args, use_reentrant=False, preserve_rng_state=False)
            else:
                out, lse = self.row_tile(*args)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs, dim=1).transpose(0, 1), torch.cat(lses, dim=1)

    def spans(self, where: Place) -> list[tuple[int, int, int, int]]:
        """(first, full_lo, full_hi, last) of every row tile, for all heads together."""
        shift, tiles = where.len_k - where.len_q, where.row_tiles()
        if where.len_q == 0:
            return [(0, 0, 0, 0)] * len(tiles)
        heads = torch.arange(where.heads, device=where.device)[:, None]
        lows = torch.tensor([start + shift for start, _ in tiles], device=where.device)
        highs = torch.tensor([stop - 1 + shift for _, stop in tiles], device=where.device)
        env = {"b": where.b, "h": heads, "q_lo": lows, "q_hi": highs, "len_q": where.len_q, "len_k": where.len_k}
        bounds = (evaluate(node, env, self.mask.tensors, self.dtype) for node in self.mask.span)
        first, full_lo, full_hi, last = (x.to(where.device).expand(where.heads, len(tiles)) for x in bounds)
        nothing = first >= last
        first, last = first.masked_fill(nothing, where.len_k).amin(0), last.masked_fill(nothing, 0).amax(0)
        full_lo, full_hi = full_lo.amax(0), full_hi.masked_fill(nothing, 0).amin(0)
        return list(zip(*(x.tolist() for x in (first, full_lo, full_hi, last)), strict=True))

    def row_tile(
        self, where: Place, start: int, span: tuple[int, int, int, int], q: Tensor, k: FinitePart, v: FinitePart
    ) -> tuple[Tensor, Tensor]:
        """Online softmax of rows [start, start + M) over the keys of their span: out [Hq, M, Dv], lse [Hq, M]."""
        rows = q.shape[2]
        grouped = q.flatten(1, 2)  # [Hkv, G*M, D]
        # Products over no keys: zeros that autograd traces to q, k and v, so a row without keys has gradients of 0.
        none = product(grouped, k.finite[:, :, :0])
        acc = product(none, v.finite[:, :0]).view(where.heads, rows, v.finite.shape[2])  # [Hq, M, Dv]
        total = none.sum(-1).view(where.heads, rows) + acc.sum(-1)  # [Hq, M]; so that an LSE gives v a gradient of 0
        peak = torch.full_like(total, -torch.inf)
        if self.sinks is not None:
            peak = self.sinks.detach()[:, None].expand_as(total)
            total = total + torch.exp(self.sinks[:, None] - _finite(peak))
        for lo, hi, masked in key_tiles(*span):
            s, keep = self.scores(where, (start, start + rows), (lo, hi, masked), grouped, k)
            old, peak = peak, torch.maximum(peak, s.detach().amax(-1))
            p = torch.exp(s - _finite(peak)[..., None])
            alpha = torch.exp(old - _finite(peak))
            total = total * alpha + p.sum(-1)
            update = product(p.view(*grouped.shape[:2], hi - lo), v.finite[:, lo:hi])
            acc = acc * alpha[..., None] + update.view_as(acc)
            if v.whole is not None:
                seen = (torch.ones_like(s, dtype=torch.bool) if keep is None else keep.expand_as(s)).to(acc.dtype)
                acc = acc + v.marks(seen.reshape(*grouped.shape[:2], hi - lo), lo, hi).view_as(acc)
        empty = total == 0
        safe = total.masked_fill(empty, 1.0)
        lse = (_finite(peak) + torch.log(safe)).masked_fill(empty, -torch.inf)
        return acc / safe[..., None], lse

    def scores(
        self, where: Place, rows: tuple[int, int], tile: tuple[int, int, bool], grouped: Tensor, k: FinitePart
    ) -> tuple[Tensor, Tensor | None]:
        """Scores [Hq, M, N] of rows (start, stop), `grouped` [Hkv, G*M, D], over a tile of keys, hidden ones -inf, and
        what the mask keeps, None where all are visible."""
        (start, stop), (lo, hi, masked) = rows, tile
        s = self.scale * k.scores(grouped, lo, hi).view(where.heads, stop - start, hi - lo)
        env = where.grid(start, stop - start, lo, hi)
        keep = evaluate(self.mask.keep, env, self.mask.tensors, self.dtype).to(s.device) if masked else None
        return self.modify(env, s, keep), keep

    def modify(self, env: dict[str, Tensor | int | float], s: Tensor, keep: Tensor | None) -> Tensor:
        """Scores [Hq, M, N] after the score function, hidden ones -inf; `keep` is None where all are visible."""
        if self.score is None:
            return s if keep is None else s.masked_fill(~keep, -torch.inf)
        if keep is not None and torch.is_grad_enabled() and not self.score.derivative.bounded:
            # The score's slope may be infinite at a hidden key; torch would multiply it by a gradient of 0: NaN.
            seen = keep.expand_as(s).nonzero(as_tuple=True)
            env = {name: x.expand_as(s)[seen] if isinstance(x, Tensor) else x for name, x in env.items()}
            visible = evaluate(self.score.out, env | {"s": s[seen]}, self.score.tensors, self.dtype)
            return torch.full_like(s, -torch.inf).index_put(seen, visible.expand(len(seen[0])))
        s = evaluate(self.score.out, env | {"s": s}, self.score.tensors, self.dtype).expand_as(s)
        return s if keep is None else s.masked_fill(~keep, -torch.inf)


@dataclass(frozen=True, eq=False)
class FinitePart:
    """Keys or values with 0 for NaN and infinity: a matrix product multiplies hidden ones by 0, which gives NaN."""

    finite: Tensor
    whole: Tensor | None  # as given, if that differs

    def scores(self, q: Tensor, lo: int, hi: int) -> Tensor:
        """Products of q [Hkv, M, D] with keys lo .. hi - 1 [Hkv, D, Sk]; no gradient where a key is not finite."""
        s = product(q, self.finite[:, :, lo:hi])
        if self.whole is None:
            return s
        keys = self.whole[:, :, lo:hi]
        return torch.where(keys.isfinite().all(1, keepdim=True), s, (q @ keys).detach())

    def marks(self, seen: Tensor, lo: int, hi: int) -> Tensor:
        """The infinities and NaN among values lo .. hi - 1 [Hkv, Sk, Dv], to add to the rows that see them (`seen`
        [Hkv, M, N] is 1). A row that sees infinities of both signs gets NaN."""
        assert self.whole is not None
        values = self.whole[:, lo:hi].detach()
        found = (values.isnan(), values == torch.inf, values == -torch.inf)
        nan, high, low = (seen @ x.to(seen) > 0 for x in found)
        marks = torch.zeros_like(nan, dtype=seen.dtype).masked_fill(high, torch.inf).masked_fill(low, -torch.inf)
        return marks.masked_fill(nan | (high & low), torch.nan)


def finite_part(x: Tensor) -> FinitePart:
    """Split off the finite part of keys or values of one sequence."""
    finite = x.isfinite()
    return FinitePart(x, None) if bool(finite.all()) else FinitePart(x.masked_fill(~finite, 0.0), x)


@dataclass(frozen=True, eq=False)
class Place:
    """One sequence of the batch: its index, lengths, query heads and device."""

    b: int
    len_q: int
    len_k: int
    heads: int
    device: torch.device

    def row_tiles(self) -> list[tuple[int, int]]:
        """Row ranges of all tiles; one empty tile when there are no rows."""
        height = TILE_SCORES // (TILE_KEYS * max(self.heads, 1))
        height = min(max(height, 16), 512)
        return [(start, min(start + height, self.len_q)) for start in range(0, max(self.len_q, 1), height)]

    def grid(self, start: int, rows: int, lo: int, hi: int) -> dict[str, Tensor | int | float]:
        """Coordinates that masks and scores see, broadcasting to [heads, rows, keys]."""
        shift = start + self.len_k - self.len_q
        return {
            "b": self.b,
            "h": torch.arange(self.heads, device=self.device)[:, None, None],
            "q": torch.arange(shift, shift + rows, device=self.device)[:, None],
            "k": torch.arange(lo, hi, device=self.device),
            "len_q": self.len_q,
            "len_k": self.len_k,
        }


def key_tiles(first: int, full_lo: int, full_hi: int, last: int) -> Iterator[tuple[int, int, bool]]:
    """Key ranges (lo, hi, needs the mask) of at most `TILE_KEYS` keys that cover [first, last)."""
    if full_lo >= full_hi:
        parts = [(first, last, True)]
    else:
        parts = [(first, full_lo, True), (full_lo, full_hi, False), (full_hi, last, True)]
    for begin, end, masked in parts:
        for lo in range(begin, end, TILE_KEYS):
            yield lo, min(lo + TILE_KEYS, end), masked


def _finite(peak: Tensor) -> Tensor:
    """The running maximum with -inf (nothing seen yet) replaced by 0, so that differences from it are not NaN."""
    return peak.masked_fill(peak == -torch.inf, 0.0)
