"""Decode over 8-bit latents on gfx942 and gfx950 in the simulator: right values, no findings, DeepSeek's bytes."""

from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn, each_once
from tests.sim.cdna.calls import ARCHS, E4M3, E5M2, check, decode_choice, simulated
from tests.sim.sm90.mla import SCALE, Latent
from tests.sim.sm90.prefill import error
from tests.sim.sm90.test_mla_eight_bit import PER, pages_of, with_narrow_rope
from tests.sim.sm100.test_mla_eight_bit import query
from warpattn.masks import Causal, CustomMask, Document, SlidingWindow
from warpattn.problem import Call
from warpattn.scores import SoftCap
from warpattn.sequences import PagedRagged, Ragged

SCHEDULES = ("eager", "lazy", "adversarial", "random")
CASES = {
    "one": Latent((200, 33), page=64),
    "mixed-causal-4": Latent((130, 0, 64, 5, 200), page=64, tokens=4, mask=Causal()),
    "group-128": Latent((130, 3), page=32, heads=128),
    "window-sinks": Latent((300, 40), page=16, tokens=2, mask=SlidingWindow(70), sinks=True),
    "soft-cap": Latent((130, 70), page=8, score=SoftCap(3.0)),
    "odd-pages": Latent((130, 5), page=3, tokens=2, mask=Causal()),
    "single-keys": Latent((20, 3), page=1),
    "by-head": Latent((100,), page=64, mask=CustomMask(lambda b, h, q, k: (k + h) % 3 != 0)),
}


def called(case: Latent, arch: str, per: str | int | None = 128, narrow: bool = False, formats: dict = E4M3) -> Call:
    """The call of a case over a cache with the format of a chip; `narrow`: with rotary parts of 8 bits."""
    kv = pages_of(case, per, formats[arch])
    kv = with_narrow_rope(kv) if narrow else kv
    sinks = torch.randn(case.heads, generator=torch.Generator().manual_seed(2)) if case.sinks else None
    return Call(query(case), kv.k_pages, kv.v_pages, kv, case.mask, case.score, sinks, SCALE, True)


NAMES = list(CASES)
DRAWN = [("odd-pages", "gfx950")]


@pytest.mark.parametrize(("name", "arch"), drawn(product(NAMES, ARCHS), DRAWN))
def test_right_and_without_findings(name, arch):
    for schedule in SCHEDULES:
        check(called(CASES[name], arch), arch, schedule=schedule)


SCALED = list(product(PER, (False, True), ARCHS))


@pytest.mark.parametrize(("per", "narrow", "arch"), drawn(
    [each for each in SCALED if each[:2] != (128, True)], [("token", True, "gfx942")]
))  # fmt: skip
def test_scales_and_rotary_parts_of_8_bits(per, narrow, arch):
    """Keys in three parts, which are combined."""
    call = called(Latent((70, 330), page=16, heads=24, tokens=2, mask=Causal()), arch, per, narrow)
    check(call, arch, decode_choice(call, arch, 3), schedule="adversarial")


@pytest.mark.parametrize(("length", "arch"), drawn(
    product((1, 63, 64, 65, 1000), ARCHS), each_once((1, 65), ARCHS)
))  # fmt: skip
def test_lengths(length, arch):
    check(called(Latent((length,), page=64), arch), arch, schedule="random")


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx950"]))
def test_the_other_format(arch):
    check(called(CASES["one"], arch, "token", formats=E5M2), arch)


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx950"]))
def test_ragged_queries(arch):
    """Of 3, 0 and 2 tokens, by the public call."""
    case = Latent((90, 40, 70), page=16, tokens=2, mask=Causal())
    call = called(case, arch)
    rows = Ragged(torch.tensor([0, 3, 3, 5], dtype=torch.int32), max_q=3)
    assert not isinstance(call.sequence, PagedRagged)
    q = call.q.flatten(0, 1)[:5]
    found, want = (wa.attention_paged(q, call.sequence, rows, mask=Causal(), scale=SCALE, backend=name)
                   for name in (f"simulate:{arch}", "reference"))  # fmt: skip
    assert error(found.float(), want.float()) < 2e-2 and bool(want.any())


@pytest.mark.parametrize(("narrow", "arch"), drawn(product((False, True), ARCHS), [(True, "gfx950")]))
def test_a_mask_that_reads_tensors(arch, narrow):
    """Hidden latents of NaN, and rotary parts and scales: the tile is computed again without them."""
    case = Latent((90,), page=64, mask=Document(torch.arange(90)[None] // 60))
    call = called(case, arch, "token", narrow)
    kv = call.sequence
    page = int(kv.block_table[0, 0])
    want = wa.attention_paged(call.q, kv, mask=case.mask, scale=SCALE)
    kv.rope[page, 7] = torch.nan
    kv.k_scale[page, 7] = torch.nan
    found = wa.attention_paged(call.q, kv, mask=case.mask, scale=SCALE, backend=f"simulate:{arch}")
    assert error(found.float(), want.float()) < 2e-2 and bool(want.any())


@pytest.mark.parametrize(("block", "arch"), drawn(product(range(4), ARCHS), each_once(range(4), ARCHS)))
def test_a_wrong_scale_is_seen(arch, block):
    """Of one block of columns."""
    call = called(Latent((70,), page=64), arch)
    kv = call.sequence
    factor = torch.ones(4)
    factor[block] = 1.1
    wrong = replace(call, sequence=kv.with_fields(k_scale=kv.k_scale * factor))
    report, out, _ = simulated(call, arch)
    assert report.clean and out < 1.6e-2
    found = wa.attention_paged(call.q, wrong.sequence, scale=SCALE, backend=f"simulate:{arch}")
    assert error(found.float(), wa.attention_paged(call.q, kv, scale=SCALE).float()) > 1.6e-2
