"""Random calls: masks x scores x sinks x dtypes x layouts x lengths x special values, one call a seed.

A call keeps to what kernels of its architecture take, so none may refuse it. Finite results are held to the bound of
their dtype (`tests/oracle.py`), gradients to theirs (`tests/gradients.py`), special values to the rule of
docs/numbers.md (`tests/specials.py`). Where kernels hide values whatever they hold, those are drawn, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

import warpattn as wa
from tests.cases import MASKS, SCORES, Case
from tests.eight_bit import in_eight_bits, over_latents, shared_latents
from tests.gradients import check_gradients, weights
from tests.oracle import Inputs, check, plain, visible
from tests.specials import SPOILS, attend, bound_of, unlike
from tests.unit.api.test_gradients import require, taken
from warpattn.problem.backends import LATENT, LATENT_TOKENS, LIMITS, BackwardLimits, EightBitLimits
from warpattn.quantized import ROW_BLOCKS
from warpattn.sequences import PagedRagged

PLAIN = sorted(set(MASKS) - {"none", "added-mask", "causal-added"})  # what is combined with &, | and ~
HEADS = ((1, 1), (2, 1), (3, 3), (4, 2), (6, 2), (8, 1), (5, 1))
DIMS = (8, 16, 40, 64, 64, 64, 72, 80, 96, 100, 128, 128, 128, 160, 192, 256)
LENGTHS = (0, 1, 2, 7, 16, 17, 63, 64, 65, 100, 127, 128, 129, 150, 200, 257)
# Scores that stay exact where products are near the end of their dtype; docs/numbers.md says what Hopper does without.
LARGE = {"none", "softcap", "bias-softcap", "softcap-alibi", "custom"}
HIDES = ("as drawn", "hidden", "partly hidden")
LAYOUTS = ("contiguous", "contiguous", "heads-first", "sliced", "unaligned")


class Drawn(NamedTuple):
    """A call, and what becomes of its tensors: "as drawn", "unseen keys", "unseen" (and values; where it `trains`), a
    kind of `specials.SPOILS`. `stored`: what scales of 8-bit keys and values belong to, if they have 8 bits, and of
    queries if these have, too; `latent`: values are the keys' 512 first columns, which alone have 8 bits; `trains`: its
    gradients are taken; `has_lse`: it returns an LSE, without which kernels move references later."""

    case: Case
    how: str
    stored: tuple[str | int, ...] = ()
    trains: bool = False
    latent: bool = False
    has_lse: bool = True


def draw(arch: str, seed: int) -> Drawn:
    """The call of a seed, every second one without an LSE."""
    drawn = _call(arch, seed)
    return drawn._replace(has_lse=drawn.trains or random.Random(f"{arch} {seed} lse").random() < 0.5)


def _call(arch: str, seed: int) -> Drawn:
    """The same: with what every architecture takes, and sometimes with what this one takes beside."""
    drawn = _plain(arch, seed)
    chance, limits = random.Random(f"{arch} {seed} more"), LIMITS[arch]
    case, what = drawn.case, chance.choice(("", "ragged", "trains", "stored", "hidden"))
    if what == "ragged" and case.kind == "paged":
        lens_q = tuple(chance.choice((0, 1, 1, 3, 17, 40, 130)) for _ in case.lens_k)
        case = replace(case, kind="paged-ragged", lens_q=lens_q)
        return drawn._replace(case=case, how=drawn.how if drawn.how in ("as drawn", "visible") else "as drawn")
    if what == "trains" and _trains(case, limits.backward):
        return Drawn(case, chance.choice(("as drawn", "unseen")), trains=True)
    if what == "stored" and limits.eight_bit is not None and case.layout != "unaligned":
        stored = _stored(case, limits.eight_bit, chance)
        return stored if "added" in case.mask else stored._replace(how=chance.choice(HIDES))
    if what == "" and limits.eight_bit is not None and limits.eight_bit.latents and case.kind == "paged":
        latent = _latent(case, limits.eight_bit, chance)
        return latent if "added" in case.mask else _hidden_latent(latent, chance)
    if what == "hidden" and "added" not in case.mask:
        return Drawn(case, chance.choice(("hidden", "partly hidden")))
    return drawn


def _stored(case: Case, limits: EightBitLimits, chance: random.Random) -> Drawn:
    """The case with keys and values of 8 bits, half of the time with queries of 8 bits where kernels multiply these."""
    dim, dim_v = (min(-(-each // 16) * 16, limits.max_dim) for each in (case.dim, case.dim_v))
    if chance.random() < 0.4:
        dim, dim_v = chance.choice((64, 128)), chance.choice((0, 64, 128))  # so that blocks of columns can have scales
    case = replace(case, dim=dim, dim_v=dim_v, page_size=-(-case.page_size // 8) * 8)
    narrow = bool(limits.queries) and chance.random() < 0.5 and max(dim, dim_v) <= limits.product_dim
    if narrow:
        case = replace(case, dtype=torch.bfloat16, scale=case.scale or None)  # the dtype of the result
    allowed = [_taken(case, limits, limits.scales_of(operand, narrow)) for operand in "kvq"[: 2 + narrow]]
    return Drawn(case, "as drawn", tuple(chance.choice(scales) for scales in allowed))


def _taken(case: Case, limits: EightBitLimits, scales: tuple[str | int | None, ...]) -> list[str | int]:
    """The scales that a case can have: of columns where blocks fill the head dims, of tokens with bf16 alone, which
    holds weights and keys times them."""
    dims = (case.dim, case.dim_v or case.dim)
    return [
        per for per in scales
        if per in ("tensor", "head") or (per == "token" and case.dtype == torch.bfloat16)
        or (per in ROW_BLOCKS and case.kind == "dense" and (case.dtype == torch.bfloat16 or limits.fp16_keys))
        or (isinstance(per, int) and not any(dim % per for dim in dims) and case.dtype == torch.bfloat16)
    ]  # fmt: skip


def _latent(case: Case, limits: EightBitLimits, chance: random.Random) -> Drawn:
    """The case over 8-bit latents with rotary columns of bf16 beside them."""
    (dim, dim_v), tokens = LATENT, min(case.seq_q, LATENT_TOKENS)
    case = replace(case, heads_q=chance.choice((1, 5, 16, 20)), heads_kv=1, dim=dim, dim_v=dim_v, seq_q=tokens)
    case = replace(case, dtype=torch.bfloat16, page_size=-(-case.page_size // 8) * 8, layout="contiguous")
    scales = [per for per in limits.latents if per is not None]
    return Drawn(case, "as drawn", (chance.choice(scales),), latent=True)


def _hidden_latent(drawn: Drawn, chance: random.Random) -> Drawn:
    """The call with latents that are not finite, perhaps of 16 bits."""
    return drawn._replace(how=chance.choice(HIDES), stored=chance.choice(((), drawn.stored)))


def _trains(case: Case, limits: BackwardLimits) -> bool:
    """Whether kernels compute a case's gradients."""
    wide = max(case.dim, case.dim_v)
    return case.kind in limits.kinds and wide <= limits.max_dim and case.scale != 0


def _plain(arch: str, seed: int) -> Drawn:
    """The call of a seed, with what every architecture takes."""
    chance = random.Random(f"{arch} {seed}")
    kind = chance.choice(("dense", "dense", "dense", "ragged", "ragged", "paged", "paged"))
    heads_q, heads_kv = chance.choice(HEADS)
    most = LIMITS[arch].max_dim
    dim = chance.choice([d for d in DIMS if d <= most])
    lengths = {} if kind == "dense" else {"lens_k": tuple(chance.choices(LENGTHS, k=chance.randint(1, 3)))}
    if kind == "ragged":
        lengths["lens_q"] = tuple(chance.choice(LENGTHS[:-2]) for _ in lengths["lens_k"])
    case = Case(
        kind=kind,
        batch=len(lengths.get("lens_k", "12"[: chance.randint(1, 2)])),
        seq_q=chance.choice(LENGTHS[1:-2] if kind == "dense" else (1, 1, 2, 5, 16, 40)),
        seq_k=chance.choice(LENGTHS),
        heads_q=heads_q,
        heads_kv=heads_kv,
        dim=dim,
        dim_v=chance.choice((0, 0, 0, 64)),
        dtype=chance.choice((torch.bfloat16, torch.float16)),
        mask=_mask(chance),
        score=chance.choice(sorted(SCORES)),
        sinks=chance.random() < 0.3,
        scale=chance.choice((None, None, 0.3, -0.2, 0.0)),
        page_size=chance.choice((1, 8, 16, 64, 100)) if kind == "paged" else 0,
        layout=chance.choice(LAYOUTS),
        **lengths,
    )
    case = _odder(case, random.Random(f"{arch} {seed} odd"))
    how = chance.choice(("as drawn", "as drawn", "unseen keys", "visible", "large"))
    exact = case.score in LARGE - ({"none"} if arch == "sm90" else set()) and "added" not in case.mask
    return Drawn(case, how if exact or how != "large" else "as drawn")


def _odder(case: Case, chance: random.Random) -> Case:
    """Sometimes with pages whose rows are no power of two, and values much wider or narrower than keys."""
    page, dim_v = chance.choice((0, 0, 3, 24, 48)), chance.choice((0, 0, 0, 8, 40, 128))
    return replace(case, page_size=page if page and case.page_size else case.page_size, dim_v=dim_v or case.dim_v)


def _mask(chance: random.Random) -> str:
    if chance.random() < 0.6:
        return chance.choice(sorted(MASKS))
    names = [chance.choice(("", "", "~")) + name for name in chance.sample(PLAIN, 2)]
    return chance.choice((" & ", " | ")).join(names)


def wrong(arch: str, drawn: Drawn) -> str:
    """What is wrong with the simulated kernels' result, or nothing."""
    if drawn.trains:
        return _wrong_gradients(arch, drawn)
    x = built(arch, drawn)
    result = attend(x, f"simulate:{arch}", drawn.has_lse)
    if drawn.how in SPOILS and drawn.how != "as drawn":
        return unlike(result, _multiplied(arch, drawn, x), bound_of(drawn.case, drawn.stored))
    return unlike_clean(arch, drawn, x, result)


def unlike_clean(arch: str, drawn: Drawn, x: Inputs, result: tuple[Tensor, Tensor | None]) -> str:
    """What differs between a result and the truth of inputs without special values, or nothing."""
    try:
        if len(drawn.stored) == 3:
            _check_product(x, *result)
        else:
            check(_multiplied(arch, drawn, x), *result)
    except AssertionError as error:
        return str(error)
    return ""


def _check_product(x: Inputs, out: Tensor, lse: Tensor | None) -> None:
    """A product of 8 bits rounds each weight to e4m3, by 2^-4 of it at most; scores are as exact as others."""
    truth, true_lse = plain(x, torch.float32)
    assert out.isfinite().all() and (out.float() - truth).norm() <= 2.0**-4 * truth.norm(), "out is off"
    if lse is not None:
        _compare_lse(lse, true_lse, 1e-3)


def _compare_lse(found: Tensor, truth: Tensor, bound: float) -> None:
    """Assert that an LSE is -inf where the truth is, and near it elsewhere."""
    assert torch.equal(found == -torch.inf, truth == -torch.inf), "lse is -inf at other rows than the truth"
    error = (found - truth)[truth != -torch.inf].abs()
    assert not error.numel() or error.max() <= bound, f"lse is off by {error.max():.3g}"


def _multiplied(arch: str, drawn: Drawn, x: Inputs) -> Inputs:
    """Keys and values as kernels multiply them: latents are rounded to bf16 times their scales on Blackwell, and on
    Hopper with more than 16 rows; on Blackwell all keys and values with scales of tokens or columns, too, unless
    queries have 8 bits."""
    seq = x.sequence
    if isinstance(seq, wa.LatentPages):
        rows = x.q.shape[-2] * (x.q.shape[1] if x.q.ndim == 4 else drawn.case.seq_q)
        if arch.startswith("gfx") or (arch == "sm90" and rows <= 16):
            return x
        latents = _times(seq.k_pages, seq.k_scale)
        keys = torch.cat([latents, seq.rope], -1)
        return replace(x, k=keys, v=latents, sequence=wa.PagedKV(keys, latents, seq.block_table, seq.lengths))
    if arch != "sm100" or len(drawn.stored) != 2:
        return x
    pages = seq.kv if isinstance(seq, PagedRagged) else seq
    rounded = {
        name: _times(y, scale) if scale.ndim > 1 else None
        for name, y, scale in (("k", x.k, pages.k_scale), ("v", x.v, pages.v_scale))
    }
    changes = {f"{name}_scale": None for name, y in rounded.items() if y is not None}
    rows = {name: y for name, y in rounded.items() if y is not None}
    if isinstance(pages, wa.PagedKV):
        changes |= {f"{name}_pages": y for name, y in rows.items()}
    pages = replace(pages, **changes)
    return replace(x, **rows, sequence=replace(seq, kv=pages) if isinstance(seq, PagedRagged) else pages)


def _times(values: Tensor, scale: Tensor | None) -> Tensor:
    return (values.float() if scale is None else wa.Quantized(values, scale).dequantized()).bfloat16()


def _wrong_gradients(arch: str, drawn: Drawn) -> str:
    """The same of the gradients; they are those that clean keys and values have."""
    inputs = require(drawn.case.build())
    k, v = inputs.k.detach().clone(), inputs.v.detach().clone()
    spoiled = replace(inputs, k=k, v=v)
    if drawn.how == "unseen":
        for keys, dark in _unseen(spoiled):
            keys[dark] = torch.nan
        for values, dark in _unseen(replace(spoiled, k=v)):
            values[dark] = torch.inf
    spoiled = replace(spoiled, k=k.requires_grad_(), v=v.requires_grad_())
    dout, dlse = weights(inputs)
    try:
        check_gradients(inputs, taken(spoiled, attend(spoiled, f"simulate:{arch}"), dout, dlse), dout, dlse)
    except AssertionError as error:
        return str(error)
    return ""


def built(arch: str, drawn: Drawn) -> Inputs:
    """The tensors of a call, with what becomes of them."""
    limits = LIMITS[arch].eight_bit
    dtype = torch.float8_e4m3fn if limits is None else limits.dtypes[0]
    inputs = drawn.case.build()
    if drawn.latent:
        latents = _with_special_values(shared_latents(inputs), drawn)
        return over_latents(latents, drawn.stored[0], dtype) if drawn.stored else latents
    if drawn.stored:
        return in_eight_bits(_with_special_values(inputs, drawn), drawn.stored, dtype)
    if drawn.how == "unseen keys":
        for k, dark in _unseen(inputs):
            k[dark] = torch.nan
        return inputs
    return _with_special_values(inputs, drawn)


def _with_special_values(inputs: Inputs, drawn: Drawn) -> Inputs:
    return SPOILS[drawn.how](inputs, torch.Generator().manual_seed(len(drawn.case.name)))


def _unseen(inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each sequence and head the keys [Sk, D], and those that no row sees."""
    for b, (q, k, _) in enumerate(inputs.sequence.walk(inputs.q, inputs.k, inputs.v)):
        heads = k.shape[1]
        seen = visible(inputs, b, range(len(q)), len(q), len(k)).any(1).unflatten(0, (heads, -1)).any(1)  # [Hkv, Sk]
        yield from ((k[:, h], ~seen[h]) for h in range(heads))
