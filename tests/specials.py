"""Special values in attention problems, and an oracle that says what becomes of them.

The oracle knows nothing of tiles: per row it takes the keys that the row sees, and nothing else, in fp64. The rule of
docs/numbers.md: a hidden key or value reaches nothing; a NaN in a visible q, k, score or sink makes output and LSE of
its row NaN, one in a visible v the output's column; a row without keys gives 0 and -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import warpattn as wa
from tests.cases import Case
from tests.eight_bit import in_eight_bits, over_latents, shared_latents
from tests.oracle import Inputs, applied, grid, visible
from warpattn.masks import Lengths
from warpattn.problem.backends import LATENT, LIMITS
from warpattn.scores import Bias
from warpattn.sequences import Dense, PagedKV, PagedRagged

LOWEST = float(torch.finfo(torch.float32).min)
LEAST = 2.0**-24, 2.0**-126  # weights of fp16, and of other types, that are not rounded to 0


def truth(inputs: Inputs, least: float = 0.0) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64, shaped as the api shapes them. Infinities whose weight is below `least` of the row's largest
    give NaN, as they do where such a weight is rounded to 0."""
    outs, lses = [], []
    for b, (q, k, v) in enumerate(inputs.sequence.walk(inputs.q, inputs.k, inputs.v)):
        heads, len_q, len_k = q.shape[1], q.shape[0], k.shape[0]
        q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // x.shape[0], dim=0) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale
        s, rows = (q @ k.mT) * scale, range(len_q)
        added = None if inputs.mask is None else inputs.mask.additive()
        for score in (inputs.score, added):
            places = grid(inputs, b, rows, len_q, len_k)
            s = s if score is None else applied(score, s, places, Lengths(len_q, len_k))
        keep = visible(inputs, b, rows, len_q, len_k)
        out, lse = torch.zeros(len_q, heads, v.shape[-1]).double(), torch.zeros(heads, len_q).double()
        for h in range(heads):
            sink = None if inputs.sinks is None else float(inputs.sinks[h])
            for i in rows:
                seen = keep[h, i]
                scores = s[h, i][seen].float().double()  # the lowest number and a score are one fp32 number
                out[i, h], lse[h, i] = one_row(scores, v[h][seen], sink, least)
        outs.append(out)
        lses.append(lse)
    return inputs.sequence.join(outs, lses)


def one_row(s: Tensor, v: Tensor, sink: float | None, least: float) -> tuple[Tensor, float]:
    """Output and LSE of a row by the scores and values that it sees."""
    logits = s if sink is None else torch.cat([s, torch.tensor([sink]).double()])
    if bool((logits == -torch.inf).all()):
        return torch.zeros(v.shape[-1]).double(), -torch.inf
    if bool((logits.isnan() | (logits == torch.inf)).any()):
        return torch.full((v.shape[-1],), torch.nan).double(), torch.nan
    lse = float(torch.logsumexp(logits, 0))
    finite = v.isfinite()
    weights = torch.exp(logits - logits.max())
    kept = torch.where((weights[: len(s)] < least)[:, None], torch.nan, v)
    marks = torch.where(finite, 0.0, kept).sum(0)  # NaN, an infinity, or NaN of two
    return (weights / weights.sum())[: len(s)] @ torch.where(finite, v, 0.0) + marks, lse


def unlike(found: tuple[Tensor, Tensor | None], inputs: Inputs, tolerance: float) -> str:
    """What differs from the truth, or nothing."""
    expected = truth(inputs)
    for name, x, y, bound in zip(("out", "lse"), found, expected, (tolerance, 2e-3), strict=True):
        if x is None:
            continue
        x = x.double()
        for kind, holds in (("nan", torch.isnan), ("inf", lambda t: ~torch.isfinite(t))):
            wrong = (holds(x) != holds(y)).nonzero()
            if len(wrong) and kind == "nan" and name == "out":  # a weight that is rounded to 0, times an infinity
                rounded, _ = truth(inputs, LEAST[inputs.q.dtype != torch.float16])
                wrong = ((x.isnan() != y.isnan()) & (x.isnan() != rounded.isnan())).nonzero()
            if len(wrong):
                at = tuple(wrong[0].tolist())
                return f"{name}: {len(wrong)} of {x.numel()} differ in {kind}, first {at}: {x[at]}, not {y[at]}"
        error = ((x - y).abs() / (1 + y.abs()))[x.isfinite() & y.isfinite()]
        if error.numel() and float(error.max()) > bound:
            return f"{name} is off by {float(error.max()):.3g}"
    return ""


def spoiled(case: Case, how: str) -> Inputs:
    """The case with special values put into its tensors."""
    inputs = case.build() if case.dim != LATENT.qk else shared_latents(case.build())
    draw = torch.Generator().manual_seed(len(case.name))
    return SPOILS[how](inputs, draw)


def _walked(inputs: Inputs) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Number, queries, keys and values of every sequence; what is written to them is in the call."""
    cache = inputs.sequence.kv if isinstance(inputs.sequence, PagedRagged) else inputs.sequence
    for b, (q, k, v) in enumerate(inputs.sequence.walk(inputs.q, inputs.k, inputs.v)):
        yield b, q, k, v
        if isinstance(cache, PagedKV):
            size = cache.k_pages.shape[1]
            for t in range(len(k)):
                at = int(cache.block_table[b, t // size]), t % size
                cache.k_pages[at], cache.v_pages[at] = k[t], v[t]


def _hidden(inputs: Inputs, draw: torch.Generator) -> Inputs:
    """NaN and infinities in all keys and values that no row of their heads sees."""
    for b, q, k, v in _walked(inputs):
        heads = k.shape[1]
        seen = visible(inputs, b, range(len(q)), len(q), len(k)).any(1).unflatten(0, (heads, -1)).any(1)  # [Hkv, Sk]
        for h in range(heads):
            dark = (~seen[h]).nonzero().flatten()
            k[dark, h], v[dark, h] = torch.nan, torch.inf
            v[dark[::2], h] = torch.nan
    return inputs


def _partly_hidden(inputs: Inputs, draw: torch.Generator) -> Inputs:
    """NaN and infinities in some values, wherever they are, and in one key. A latent is a key, too, and one is enough
    for a row."""
    if inputs.q.shape[-1] == LATENT.qk:
        return seen_by_some(inputs)
    for _, _, k, v in _walked(inputs):
        for column, value in enumerate((torch.nan, torch.inf, -torch.inf)):
            for j in torch.randint(0, max(len(v), 1), (4,), generator=draw).tolist()[: len(v)]:
                v[j, :, 3 * column] = value
        if len(v):
            v[-1] = torch.nan
            k[int(torch.randint(0, len(k), (1,), generator=draw)), 0, 5] = torch.nan
    return inputs


def seen_by_some(inputs: Inputs) -> Inputs:
    """NaN in the values of two keys that some rows see and others do not."""
    for b, q, k, v in _walked(inputs):
        seen = visible(inputs, b, range(len(q)), len(q), len(k)).flatten(0, 1)
        some = (seen.any(0) & ~seen.all(0)).nonzero().flatten().tolist()
        v[some[:1] + some[-1:]] = torch.nan
    return inputs


def _visible(inputs: Inputs, draw: torch.Generator) -> Inputs:
    """NaN in queries; rows of captured tensors at NaN, -inf and the lowest number; sinks of NaN and infinities."""
    for _, q, _, _ in _walked(inputs):
        if len(q):
            q[len(q) // 2, 0, 1] = torch.nan
    added = inputs.score.bias if isinstance(inputs.score, Bias) else getattr(inputs.mask, "mask", None)
    if isinstance(added, Tensor) and added.is_floating_point() and added.shape[-2] > 12:
        added[..., 3, :] = LOWEST
        added[..., 5, :] = torch.where(torch.rand(added.shape[-1], generator=draw) < 0.5, LOWEST, -torch.inf)
        added[..., 7, ::3] = LOWEST
        added[..., 9, 4:5] = torch.nan
        added[..., 11, :] = -1e35
    if inputs.sinks is not None:
        inputs.sinks[0] = torch.nan
        inputs.sinks[-1] = -torch.inf
    return inputs


def _large(inputs: Inputs, draw: torch.Generator) -> Inputs:
    """Queries and keys of two magnitudes near the end of their dtype; sums of their products are exact."""
    top = 2.0**15 if inputs.q.dtype == torch.float16 else 2.0**60
    q, k = inputs.q.sign() * top, inputs.k.sign() * top
    if hasattr(inputs.sequence, "k_pages"):
        pages = inputs.sequence.k_pages
        return replace(inputs, q=q, sequence=replace(inputs.sequence, k_pages=pages.sign() * top))
    return replace(inputs, q=q, k=k)


SPOILS: dict[str, Callable[[Inputs, torch.Generator], Inputs]] = {
    "as drawn": lambda inputs, draw: inputs,
    "hidden": _hidden,
    "partly hidden": _partly_hidden,
    "visible": _visible,
    "large": _large,
}

_PREFILL = Case(batch=1, seq_q=140, seq_k=150, heads_q=2, heads_kv=1, dim=64, dtype=torch.bfloat16, mask="causal")
_PAGED = Case(kind="paged", batch=2, page_size=16, heads_q=4, heads_kv=1, dim=64, dtype=torch.bfloat16)
CALLS = {
    "causal": _PREFILL,
    "full": replace(_PREFILL, mask="full", sinks=True),
    "window": replace(_PREFILL, mask="window-both", dtype=torch.float16, sinks=True, layout="heads-first"),
    "added": replace(_PREFILL, dim=128, mask="causal-added", score="softcap"),
    "padded": replace(_PREFILL, batch=2, seq_q=70, seq_k=200, mask="padding"),
    "scattered": replace(_PREFILL, dim=128, seq_k=200, mask="dense-mask", sinks=True),
    "ragged": replace(_PREFILL, kind="ragged", batch=2, lens_q=(20, 7), lens_k=(160, 19), mask="dense-mask"),
    "one row": replace(_PAGED, seq_q=1, lens_k=(150, 0), mask="window", score="bias", sinks=True),
    "few rows": replace(_PAGED, seq_q=20, lens_k=(150, 30), mask="causal"),
    "one row, padded": Case(batch=2, seq_q=1, seq_k=300, heads_q=4, dim=64, dtype=torch.float16, mask="padding"),
    "few rows, scattered": replace(_PREFILL, seq_q=30, seq_k=300, heads_q=4, mask="dense-mask", sinks=True),
    "causal, 96": replace(_PREFILL, dim=96),
    "window, 256": replace(_PREFILL, seq_q=70, dim=256, mask="window-both", sinks=True),
    "padded, 80": replace(_PREFILL, dim=80, mask="causal-padding"),
    "scattered, 192/128": replace(_PREFILL, dim=192, dim_v=128, mask="dense-mask"),
    "padded, 256": replace(_PREFILL, seq_q=70, seq_k=200, dim=256, mask="padding"),
    "scattered, 160, pages": replace(_PAGED, seq_q=70, lens_k=(150, 30), dim=160, mask="causal-documents"),
    "one row, 128": replace(_PAGED, seq_q=1, lens_k=(150, 20), dim=128, mask="dense-mask"),
    "many rows, 128": replace(_PAGED, seq_q=2, lens_k=(150, 20), heads_q=40, dim=128, mask="window-both"),
    "few rows, pages of 3": replace(_PAGED, seq_q=20, lens_k=(150, 30), mask="causal-documents", page_size=3),
    "one row, pages of 12": replace(_PAGED, seq_q=1, lens_k=(150, 20), dim=128, mask="dense-mask", page_size=12),
    "ragged, pages of 1": replace(_PAGED, kind="paged-ragged", lens_q=(30, 2), lens_k=(150, 20), mask="window-both",
                                  page_size=1),
    "one row, 256": replace(_PAGED, seq_q=1, lens_k=(150, 20), dim=256, mask="window", page_size=64),
}  # fmt: skip
WIDE = {
    "causal, 160": replace(_PREFILL, seq_q=90, seq_k=90, dim=160),
    "causal, 192/128": replace(_PREFILL, seq_q=90, seq_k=90, dim=192, dim_v=128, sinks=True),
    "causal, 256, ragged": replace(_PREFILL, kind="ragged", batch=2, lens_q=(40, 7), lens_k=(50, 9), dim=256),
    "window, 256, pages": replace(_PAGED, seq_q=20, lens_k=(150, 30), dim=256, mask="causal-window"),
}
E4M3 = torch.float8_e4m3fn
HEADS, TOKENS = ("head",) * 3, ("token",) * 3
_CHUNK = replace(_PAGED, seq_q=40, lens_k=(150, 30), mask="causal", dim=128)
# With what scales of k and v belong to, and of q if it has 8 bits, too.
EIGHT_BIT: dict[str, tuple[Case, tuple[str | int, ...]]] = {
    "products": (replace(_PREFILL, sinks=True), HEADS),
    "products, padded": (replace(CALLS["padded"], dim=128), HEADS),
    "products, window": (replace(_PREFILL, mask="window-both", dim=80, dim_v=48), ("tensor",) * 3),
    "products, scattered": (replace(CALLS["scattered"], score="softcap"), HEADS),
    "products, ragged": (replace(CALLS["ragged"], dim=64), HEADS),
    "products, rows, 256": (replace(_PREFILL, dim=256, seq_q=70), ("64 rows", "head", "64 rows")),
    "converted": (replace(_PREFILL, dim=128, sinks=True), HEADS[:2]),
    "converted, padded": (CALLS["padded"], TOKENS[:2]),
    "converted, window, 256": (CALLS["window, 256"], HEADS[:2]),
    "converted, scattered": (replace(CALLS["scattered"], score="softcap"), TOKENS),
    "converted, ragged": (CALLS["ragged"], ("head", "token")),
    "converted, columns": (replace(_PREFILL, dim=128, mask="causal-padding"), (64, 64)),
    "converted, pages": (_CHUNK, HEADS),
    "converted, pages, columns": (replace(_CHUNK, dim=192, dim_v=128, page_size=24), (64, "token")),
}  # fmt: skip
_LATENT = replace(_PAGED, seq_q=3, heads_q=30, dim=LATENT.qk, dim_v=LATENT.v, lens_k=(150, 30), mask="causal")
_DENSE_LATENT = replace(_LATENT, kind="dense", lens_k=(), page_size=0, seq_k=150)
# With what scales of latents belong to, if these have 8 bits.
LATENTS: dict[str, tuple[Case, tuple[str | int, ...]]] = {
    "latents": (_LATENT, ()),
    "latents, window": (replace(_DENSE_LATENT, batch=1, mask="window-both", sinks=True), ()),
    "latents, padded": (replace(_DENSE_LATENT, seq_q=1, mask="padding"), ()),
    "latents, scattered": (replace(_LATENT, page_size=3, mask="dense-mask", score="softcap"), ()),
    "latents, ragged": (replace(_LATENT, kind="paged-ragged", lens_q=(3, 1), mask="causal-window"), ()),
    "latents, few rows": (replace(_LATENT, heads_q=4, mask="window"), ()),
    "latents, one row": (replace(_LATENT, seq_q=1, heads_q=16, mask="window"), ()),
    "latents, dense": (replace(_DENSE_LATENT, batch=1, heads_q=8), ()),
    "latents, one row, window": (replace(_LATENT, seq_q=1, heads_q=128, page_size=64, mask="window"), ()),
    "latents, many rows": (replace(_LATENT, seq_q=2, heads_q=128, page_size=64), ()),
    "latents, five tokens": (replace(_LATENT, seq_q=5, heads_q=16, page_size=3), ()),
    "8-bit latents": (_LATENT, (128,)),
    "8-bit latents, scattered": (replace(_LATENT, mask="dense-mask", score="softcap"), ("token",)),
    "8-bit latents, few rows": (replace(_LATENT, heads_q=4), (128,)),
    "8-bit latents, one row": (replace(_LATENT, seq_q=1, heads_q=16, mask="window"), ("token",)),
    "8-bit latents, five tokens": (replace(_LATENT, seq_q=5, heads_q=16, page_size=64), ("tensor",)),
    "8-bit latents, few rows, scattered": (replace(_LATENT, heads_q=5, mask="dense-mask", sinks=True), ("tensor",)),
}  # fmt: skip


def attend(x: Inputs, backend: str, has_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of any kind of sequence; without an LSE it is None, and kernels move references later."""
    tail: dict[str, Any] = {"mask": x.mask, "score": x.score, "sinks": x.sinks, "scale": x.scale}
    tail |= {"return_lse": has_lse, "backend": backend}
    k, v, seq = x.k, x.v, x.sequence
    if isinstance(seq, PagedRagged):
        result = wa.attention_paged(x.q, seq.kv, seq.queries, **tail)
    elif isinstance(seq, wa.PagedKV):
        result = wa.attention_paged(x.q, seq, **tail)
    elif isinstance(seq, wa.Ragged):
        result = wa.attention_varlen(x.q, k, v, seq, **tail)
    elif isinstance(seq, Dense) and seq.k_scale is not None and seq.v_scale is not None:
        q = x.q if seq.q_scale is None else wa.Quantized(x.q, seq.q_scale)
        result = wa.attention(q, wa.Quantized(k, seq.k_scale), wa.Quantized(v, seq.v_scale), **tail)
    else:
        result = wa.attention(x.q, k, v, **tail)
    return result if isinstance(result, tuple) else (result, None)


def bound_of(case: Case, stored: tuple[str | int, ...]) -> float:
    """Of the error of an output, also where it is small: products of 8 bits round weights to three bits."""
    return 0.1 if len(stored) == 3 else 0.02 if case.dtype == torch.float16 else 0.04


def differences(arch: str, call: str, kinds: Iterable[str], has_lse: bool = True) -> list[str]:
    """Where the simulated kernels of an architecture, with an LSE or without, leave the rule, by kinds of special
    values."""
    case, stored = EIGHT_BIT.get(call) or LATENTS.get(call) or ((CALLS | WIDE)[call], ())
    limits = LIMITS[arch].eight_bit
    dtype = E4M3 if limits is None else limits.dtypes[0]
    found = []
    for how in kinds:
        x = spoiled(case, how)
        if stored:
            x = over_latents(x, stored[0], dtype) if call in LATENTS else in_eight_bits(x, stored, dtype)
        wrong = unlike(attend(x, f"simulate:{arch}", has_lse), x, bound_of(case, stored))
        found += [f"{how}: {wrong}"] if wrong else []
    return found
