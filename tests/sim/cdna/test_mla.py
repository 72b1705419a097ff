"""Decode of latent attention on gfx942 and gfx950 in the simulator: right values, no findings, the public calls."""

from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn
from tests.sim.cdna.calls import ARCHS, check, decode_choice, ready_of
from tests.sim.sm90.mla import SCALE, Latent, tensors
from tests.sim.sm90.prefill import error
from warpattn.kernels.cdna.select import choose
from warpattn.masks import Causal, CustomMask, SlidingWindow
from warpattn.problem.arch import ARCHS as TARGETS
from warpattn.scores import SoftCap

both = pytest.mark.parametrize("arch", ARCHS)
MIXED = (130, 0, 64, 5, 200)

CASES = {
    "dense": Latent((130, 130)),
    "mixed-causal-4": Latent(MIXED, page=64, tokens=4, mask=Causal()),
    "group-128": Latent((130, 3), page=64, heads=128),
    "window-sinks": Latent((300, 40), page=16, tokens=2, mask=SlidingWindow(70), sinks=True),
    "soft-cap-fp16": Latent((130, 70), page=64, score=SoftCap(3.0), dtype=torch.float16),
    "odd-group-16-tokens": Latent((70, 90), page=128, heads=5, tokens=16, mask=Causal()),
    "odd-pages": Latent((130, 5), page=3, tokens=2, mask=Causal()),
    "single-keys": Latent((20, 3), page=1),
    "by-head": Latent((100,), mask=CustomMask(lambda b, h, q, k: (k + h) % 3 != 0)),
}


NAMES, PARTITIONS = list(CASES), (1, 3)
KERNELS = list(product(NAMES, PARTITIONS, ARCHS))
DRAWN = [("mixed-causal-4", 1, "gfx942"), ("window-sinks", 3, "gfx950")]


@pytest.mark.parametrize(("name", "partitions", "arch"), drawn(KERNELS, DRAWN))
def test_right_and_without_findings(arch, name, partitions):
    call = tensors(CASES[name]).call(CASES[name])
    check(call, arch, decode_choice(call, arch, partitions), schedule="lazy")


LENGTHS = (1, 63, 65, 1000)


@pytest.mark.parametrize(("length", "arch"), drawn(product(LENGTHS, ARCHS), [(1, "gfx942")]))
def test_lengths(arch, length):
    case = Latent((length,), page=64)
    check(tensors(case).call(case), arch, schedule="random")


@both
def test_a_tile_has_32_rows(arch):
    """With 64, queries of 576 columns and a quarter of 512 of the output do not fit into a wave's registers."""
    case = Latent((500,), heads=128)
    choice = choose(ready_of(tensors(case).call(case), arch).problem, TARGETS[arch])
    assert (choice.config.block_m, choice.config.pack, choice.grid[0]) == (32, 32, 4)


@pytest.mark.full
@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx942"]))
def test_nothing_visible(arch):
    case = Latent((100, 0), page=64, mask=CustomMask(lambda b, h, q, k: k < 0))
    x = tensors(case)
    tail = {"mask": case.mask, "scale": SCALE, "return_lse": True}
    out, lse = wa.attention_paged(x.q, x.sequence, **tail, backend=f"simulate:{arch}")
    assert not out.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize(("page", "arch"), drawn(product((0, 64), ARCHS), [(64, "gfx950")]))
def test_public_calls(arch, page):
    case = Latent((70, 70), page=page, tokens=2, mask=Causal(), sinks=True)
    x = tensors(case)
    tail = {"mask": case.mask, "sinks": x.sinks, "scale": SCALE, "return_lse": True, "backend": f"simulate:{arch}"}
    out, lse = wa.attention_paged(x.q, x.sequence, **tail) if page else wa.attention(x.q, x.k, x.v, **tail)
    want, want_lse = x.expected(case)
    assert error(out.float(), want.float()) < 2e-2 and error(lse, want_lse) < 1e-4


def test_values_of_their_own_are_refused():
    x = tensors(Latent((70,)))
    with pytest.raises(wa.AttentionError, match=r"v must be the view k\[..., :512\]"):
        wa.attention(x.q, x.k, x.v.clone(), scale=SCALE, backend="simulate:gfx950")


def test_prefill_is_refused():
    x = tensors(replace(Latent((70,)), tokens=17))
    with pytest.raises(wa.AttentionError, match="q has 17 tokens a sequence"):
        wa.attention(x.q, x.k, x.v, scale=SCALE, backend="simulate:gfx942")
