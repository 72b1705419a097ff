"""Batch-invariant latent attention, simulated: a token has the same bits in every step, a prompt in every batch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn
from tests.sim.test_latent_query import L, as_engines_have_them, pages
from warpattn.masks import Mask
from warpattn.masks.base import InOrder
from warpattn.problem import Call, validate
from warpattn.problem.launch import PlanOptions
from warpattn.problem.operands import Operands
from warpattn.runtime.launches import list_launches
from warpattn.runtime.simulate import Options, run_launch
from warpattn.sequences import PagedKV, PagedRagged, Ragged
from warpattn.sim.simulate import linked

SCALE, INVARIANT = 192**-0.5, PlanOptions(batch_invariant=True)


@pytest.fixture(autouse=True)
def _sums_in_one_order(monkeypatch):
    """A product's sums, as on the card; numpy's depend on where in a matrix a row is."""
    monkeypatch.setattr(np, "matmul", partial(np.einsum, "...mk,...kn->...mn", optimize=False))
    linked.cache_clear()
    yield
    linked.cache_clear()


def attended(arch: str, q: wa.LatentQuery, kv: PagedKV, tokens: list[int], mask: Mask) -> tuple[Tensor, Tensor]:
    """(out, lse) of a step, as the plan of an engine launches it; what no kernel writes is NaN."""
    offsets = torch.tensor([0, *tokens]).cumsum(0).int()
    seq = PagedRagged(kv.with_fields(q_rope=q.rope), Ragged(offsets, max_q=max(tokens)))
    call = Call(q.nope, kv.k_pages, kv.v_pages, seq, InOrder(mask), None, None, SCALE, True, None, f"simulate:{arch}")
    ready = validate(call, read_values=False)
    out, lse = torch.full_like(q.nope, torch.nan), torch.full(ready.lse_shape, torch.nan)
    launches = list_launches(ready, Operands(q.nope, kv.k_pages, kv.v_pages, out, lse, None), seq, INVARIANT)
    assert len(launches) == 1, "keys are in no parts"
    for launch in launches:
        assert run_launch(launch, Options("eager")).clean
    return out, lse


def as_latents(kv: PagedKV, narrow: bool) -> PagedKV:
    """The same cache with latents of 8 bits, if `narrow`."""
    if not narrow:
        return kv
    clean = kv.k_pages.nan_to_num()
    latents, rope = clean[..., :L].to(torch.float8_e4m3fn), clean[..., L:].contiguous()
    return wa.LatentPages(latents, rope, kv.block_table, kv.lengths, scale=torch.tensor(0.5))


def rows_of(q: wa.LatentQuery, first: int, last: int) -> wa.LatentQuery:
    return wa.LatentQuery(q.nope[first:last], q.rope[first:last])


CASES = {"causal": (16, wa.Causal(), False), "window": (16, wa.SlidingWindow(50), False),
         "two-tiles": (80, wa.Causal(), False), "8-bit": (16, wa.Causal(), True)}  # fmt: skip
ARCHS = ("sm90", "sm100", "gfx942", "gfx950")
ALL = {f"{arch}-{name}": (arch, name) for arch in ARCHS for name in CASES if name != "8-bit" or "sm" in arch}


@pytest.mark.parametrize("case", drawn(ALL, ["sm100-causal"]))
def test_a_token_has_the_same_bits_in_every_step(case):
    """Six tokens of a sequence of five tiles of keys beside other requests, then in two steps, and the last one alone:
    scores are so large that references of rows move."""
    arch, name = ALL[case]
    heads, mask, narrow = CASES[name]
    torch.manual_seed(0)
    kv, both = as_latents(pages(16, (33, 150, 70)), narrow), as_engines_have_them(1, 9, heads)
    q = wa.LatentQuery(both.nope[0] * 4, both.rope[0])
    whole, whole_lse = attended(arch, q, kv, [2, 6, 1], mask)
    seq = wa.Ragged(torch.tensor([0, 2, 8, 9], dtype=torch.int32))
    tail = {"mask": mask, "scale": SCALE, "return_lse": True, "backend": "reference"}
    wanted, wanted_lse = wa.attention_paged(q, kv, seq, **tail)
    assert (whole - wanted).abs().max() < 2e-2 * wanted.abs().max()
    assert (whole_lse - wanted_lse).abs().max() < 1e-3
    for begin, end in ((0, 5), (5, 6), (2, 6)):
        length = kv.lengths[1:2] - 6 + end
        alone = kv.with_fields(block_table=kv.block_table[1:2], lengths=length)
        part, part_lse = attended(arch, rows_of(q, 2 + begin, 2 + end), alone, [end - begin], mask)
        assert torch.equal(part, whole[2 + begin : 2 + end]), (begin, end)
        assert torch.equal(part_lse, whole_lse[:, 2 + begin : 2 + end])


def prompts(arch: str, q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """(out, lse) of prompts laid end to end, as a batch-invariant plan launches them."""
    seq = Ragged(torch.tensor([0, *lengths]).cumsum(0).int())
    ready = validate(Call(q, k, v, seq, InOrder(wa.Causal()), None, None, SCALE, True, None, f"simulate:{arch}"), False)
    out, lse = torch.full_like(v, torch.nan), torch.full(ready.lse_shape, torch.nan)
    for launch in list_launches(ready, Operands(q, k, v, out, lse, None), seq, INVARIANT):
        assert run_launch(launch, Options("eager")).clean
    return out, lse


@pytest.mark.full
@pytest.mark.parametrize("arch", drawn(ARCHS, ["sm90"]))
def test_a_prompt_has_the_same_bits_in_every_batch(arch):
    """By heads of 192 and 128 columns, as engines attend for prompts of latent attention."""
    torch.manual_seed(0)
    lengths = [70, 300, 5]
    q, k = (torch.randn(sum(lengths), 2, 192).bfloat16() * size for size in (4, 1))
    v = torch.randn(sum(lengths), 2, 128).bfloat16()
    whole, whole_lse = prompts(arch, q, k, v, lengths)
    wanted, _ = wa.attention_varlen(q, k, v, Ragged(torch.tensor([0, 70, 370, 375]).int()), mask=wa.Causal(),
                                    scale=SCALE, return_lse=True, backend="reference")  # fmt: skip
    assert (whole - wanted).abs().max() < 2e-2 * wanted.abs().max()
    first = 0
    for length in lengths:
        own = slice(first, first + length)
        part, lse = prompts(arch, q[own], k[own], v[own], [length])
        assert torch.equal(part, whole[own]) and torch.equal(lse, whole_lse[:, own])
        first += length
