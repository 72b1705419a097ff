"""append_paged and append_slots inside of torch.compile(fullgraph=True): the same cache as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import warpattn as wa

TABLE, LENGTHS = torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([20, 40], dtype=torch.int32)
ANGLES = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
SLOTS = torch.tensor([5, -1])


def paged(new: Tensor, cache: dict[str, Tensor], **rotation: Any) -> Tensor:
    """Appends what is computed from `new`, and attends."""
    pages, scales = split(cache)
    wa.append_paged(*pages, TABLE, LENGTHS, new * 2, new + 1, **scales, **rotation)
    return wa.attention_paged(new, wa.PagedKV(*pages, TABLE, LENGTHS, **scales))


def slots(new: Tensor, cache: dict[str, Tensor], **rotation: Any) -> Tensor:
    pages, scales = split(cache)
    positions = {"positions": SLOTS.clamp(0)} if rotation else {}
    wa.append_slots(new[:, 0] * 2, new[:, 0] + 1, *pages, SLOTS, **scales, **positions, **rotation)
    return wa.attention_paged(new, wa.PagedKV(*pages, TABLE, LENGTHS, **scales))


def split(cache: dict[str, Tensor]) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Pages, two views of one tensor, and their scales."""
    k, v = cache["pages"].unbind(1)
    return (k, v), {name: x for name, x in cache.items() if name != "pages"}


def cache_of(kind: str) -> dict[str, Tensor]:
    pages = torch.randn(8, 2, 16, 2, 32)
    if kind == "16 bits":
        return {"pages": pages}
    scales = {"one scale": (), "scales of tokens": (8, 16, 2)}[kind]
    return {"pages": pages.to(torch.float8_e4m3fn)} | {name: torch.ones(scales) for name in ("k_scale", "v_scale")}


@pytest.mark.parametrize("rotation", [{}, {"cos": ANGLES.cos(), "sin": ANGLES.sin(), "interleaved": True}], ids=bool)
@pytest.mark.parametrize("kind", ["16 bits", "one scale", "scales of tokens"])
@pytest.mark.parametrize("step", [paged, slots])
def test_the_same_cache(step: Callable[..., Tensor], kind: str, rotation: dict[str, Any]) -> None:
    torch.manual_seed(0)
    cache, new = cache_of(kind), torch.randn(2, 1, 2, 32)
    before = {name: x.clone() for name, x in cache.items()}
    other = {name: x.clone() for name, x in cache.items()}
    wanted = step(new, cache, **rotation)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(new, other, **rotation)
    torch.testing.assert_close(found, wanted)
    for name, x in cache.items():
        assert torch.equal(x.float(), other[name].float()), name
    assert not torch.equal(before["pages"].float(), other["pages"].float())


def test_one_tensor_of_latents() -> None:
    latents, new = torch.zeros(4, 16, 1, 32), torch.randn(2, 1, 32)
    compiled = torch.compile(lambda x, pages: wa.append_slots(x, None, pages, None, SLOTS), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    compiled(new, latents)
    assert torch.equal(latents[0, 5], new[0]) and latents.count_nonzero() == 32


def test_a_broken_rule_is_one_error_when_the_graph_runs() -> None:
    cache, new = cache_of("16 bits")["pages"].unbind(1), torch.randn(2, 1, 2, 32)
    compiled = torch.compile(wa.append_paged, fullgraph=True, backend="aot_eager")
    with pytest.raises(wa.AttentionError, match=r"block_table has dtype torch.int64"):
        compiled(*cache, TABLE.long(), LENGTHS, new, new)


def test_gradients_are_refused_as_without_a_graph() -> None:
    cache, new = cache_of("16 bits")["pages"].unbind(1), torch.randn(2, 1, 2, 32, requires_grad=True)
    for step in (wa.append_paged, torch.compile(wa.append_paged, fullgraph=True, backend="aot_eager")):
        with pytest.raises(Exception, match="k_new requires a gradient; append_paged has none; call it under"):
            step(*cache, TABLE, LENGTHS, new, new)
    with torch.no_grad():
        torch.compile(wa.append_paged, fullgraph=True, backend="aot_eager")(*cache, TABLE, LENGTHS, new, new)


@pytest.mark.filterwarnings("ignore")
def test_inductor() -> None:
    cache, new = cache_of("scales of tokens"), torch.randn(2, 1, 2, 32)
    other = {name: x.clone() for name, x in cache.items()}
    try:
        torch.compile(paged, fullgraph=True)(new, other)
    except Exception as error:
        if "No working C++ compiler" in str(error):
            pytest.skip(f"inductor has no C++ compiler here: {str(error).splitlines()[0]}")
        raise
    paged(new, cache)
    assert all(torch.equal(x.float(), other[name].float()) for name, x in cache.items())
