"""What no row may see is NaN or infinite: the results are those of clean inputs.

Latent attention, 8-bit caches and gradients, random calls of every architecture. Poison is in every hidden key and
value, in unused pages, in rows past a sequence's end, between the rows of a tensor, and before and after it in its
storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases import Case
from tests.drawn import drawn
from tests.gradients import check_gradients, weights
from tests.oracle import Inputs, visible
from tests.random_calls import Drawn, attend, built, draw, unlike_clean
from tests.unit.api.test_gradients import require, taken
from warpattn.problem.backends import LATENT
from warpattn.sequences import Dense, PagedRagged

MARGIN = 1024  # elements before and after a tensor, so that it stays aligned
POISONS = (float("nan"), float("inf"))  # in formats without infinities both are NaN
BESIDE = ("rope", "k_scale", "v_scale")  # what a sequence has beside keys and values
BF16 = torch.bfloat16
LATENTS = Case(kind="paged", batch=2, seq_q=2, heads_q=9, heads_kv=1, dim=LATENT.qk, dim_v=LATENT.v, dtype=BF16,
               lens_k=(150, 30), page_size=16)  # fmt: skip
LATENT_CALLS = {mask: Drawn(replace(LATENTS, mask=mask), "", latent=True) for mask in ("causal", "window", "scattered")}
# Calls whose kernels hide all, see docs/numbers.md: seeds of random calls, and names of latent ones of 16 bits.
SEEDS: dict[str, tuple[int | str, ...]] = {
    "sm90": (0, 2, 8, 11, 15, 16, 18, 19, 25, 32, 36, 40, 48, 49, 55, 57, 59, "causal", "window", "scattered"),
    "sm100": (16, 17, 22, 26, 31, 35, 36, 46, 47, 57, "causal", "window", "scattered"),
    "gfx950": (3, 8, 14, 23, 25, 30, 36, 38, 39, 41, 50, 51, 53, 55, 56, 57, 58, "causal", "scattered"),
}


def around(x: Tensor, poison: float) -> Tensor:
    """The same numbers in a storage of poison, which is before, after and between them."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    storage = torch.full((extent + 2 * MARGIN,), poison).to(x.dtype)
    return torch.as_strided(storage, x.shape, x.stride(), MARGIN).copy_(x)


def cache_of(inputs: Inputs) -> Any:
    """The sequence that has the scales, and pages where there are some."""
    return inputs.sequence.kv if isinstance(inputs.sequence, PagedRagged) else inputs.sequence


def places(inputs: Inputs, b: int, len_k: int) -> list[tuple[int, ...]]:
    """Where the keys of sequence `b` are."""
    seq = cache_of(inputs)
    if hasattr(seq, "block_table"):
        size = seq.k_pages.shape[1]
        return [(int(seq.block_table[b, t // size]), t % size) for t in range(len_k)]
    if isinstance(seq, Dense):
        return [(b, t) for t in range(len_k)]
    first = int((seq.cu_q if seq.cu_k is None else seq.cu_k)[b])
    return [(first + t,) for t in range(len_k)]


def dark_places(inputs: Inputs) -> Iterator[tuple[int, ...]]:
    """(…, head) of every key of a sequence that no row sees."""
    for b, (q, k, _) in enumerate(inputs.sequence.walk(inputs.q, inputs.k, inputs.v)):
        heads = k.shape[1]
        seen = visible(inputs, b, range(len(q)), len(q), len(k)).any(1).unflatten(0, (heads, -1)).any(1)  # [Hkv, Sk]
        for t, place in enumerate(places(inputs, b, len(k))):
            yield from ((*place, h) for h in range(heads) if not seen[h, t])


def unowned_places(inputs: Inputs) -> Iterator[tuple[int, ...]]:
    """Rows of pages that no sequence has."""
    seq = cache_of(inputs)
    if hasattr(seq, "block_table"):
        owned = {place for b, n in enumerate(seq.lengths.tolist()) for place in places(inputs, b, n)}
        pages, size = seq.k_pages.shape[:2]
        yield from ((page, row) for page in range(pages) for row in range(size) if (page, row) not in owned)


def poisoned(inputs: Inputs, poison: float) -> Inputs:
    """The same call with poison wherever no row may look."""
    seq = cache_of(inputs)
    paged = hasattr(seq, "block_table")
    found = {"k": inputs.k, "v": inputs.v} | {name: getattr(seq, name, None) for name in BESIDE}
    found = {name: around(x, poison) for name, x in found.items() if x is not None}
    latents = found["k"][..., : LATENT.v] if inputs.k.shape[-1] in LATENT else None
    if latents is not None:  # keys and values are one memory
        found["v"] = latents
        if "k_scale" in found:
            found["v_scale"] = found["k_scale"]
    for place in (*unowned_places(inputs), *dark_places(inputs)):
        for x in found.values():
            if x.shape[:2] == found["k"].shape[:2]:  # others have no row for each key
                x[place] = poison
    fields = {name: x for name, x in found.items() if name in BESIDE}
    if paged:
        fields |= {"k_pages": found["k"], "v_pages": found["v"]}
    seq = seq.with_fields(**fields) if paged else replace(seq, **fields)
    sequence = replace(inputs.sequence, kv=seq) if isinstance(inputs.sequence, PagedRagged) else seq
    return replace(inputs, q=around(inputs.q, poison), k=found["k"], v=found["v"], sequence=sequence)


def drawn_call(arch: str, seed: int | str) -> Drawn:
    return LATENT_CALLS[seed] if isinstance(seed, str) else draw(arch, seed)._replace(how="as drawn")


def wrong(arch: str, call: Drawn, poison: float) -> str:
    """What differs from the truth of clean inputs, or nothing."""
    if call.trains:
        inputs = require(call.case.build())
        dout, dlse = weights(inputs)
        x = require(poisoned(inputs, poison))
        try:
            mine = taken(x, attend(x, f"simulate:{arch}"), around(dout, poison), around(dlse, poison))
            check_gradients(inputs, mine, dout, dlse)
        except AssertionError as error:
            return str(error)
        return ""
    inputs = call.case.build() if call.latent and not call.stored else built(arch, call)
    if call.latent and not call.stored:
        pages = inputs.sequence.k_pages
        values = pages[..., : LATENT.v]
        inputs = replace(inputs, k=pages, v=values, sequence=replace(inputs.sequence, v_pages=values))
    return unlike_clean(arch, call, inputs, attend(poisoned(inputs, poison), f"simulate:{arch}", call.has_lse))


CALLS = [(arch, seed) for arch, seeds in SEEDS.items() for seed in seeds]
KEPT = [("sm90", "causal"), ("gfx950", 14)]


@pytest.mark.usefixtures("unread_scales")
@pytest.mark.parametrize(("arch", "seed"), drawn(CALLS, KEPT))
def test_what_is_hidden_changes_nothing(arch, seed):
    call = drawn_call(arch, seed)
    for poison in POISONS:
        found = wrong(arch, call, poison)
        assert not found, f"{found}: {call.case.name}"


def test_a_mask_that_hides_less_is_seen(monkeypatch):
    wider = lambda x, *_, attend=attend: attend(replace(x, mask=None), "reference")  # noqa: E731
    monkeypatch.setitem(globals(), "attend", wider)
    assert "NaN" in wrong("sm90", LATENT_CALLS["window"], POISONS[0])
