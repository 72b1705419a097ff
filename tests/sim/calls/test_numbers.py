"""Special values in simulated kernels of every architecture, against an oracle that knows nothing of tiles."""

import linecache
import math
from collections.abc import Iterable, Iterator
from itertools import product

import pytest

pytest.importorskip("triton")

import torch

import warpattn as wa
from tests.drawn import drawn
from tests.specials import CALLS, EIGHT_BIT, LATENTS, LOWEST, SPOILS, WIDE, differences
from warpattn.runtime import simulate as runtime
from warpattn.sim.ir.module import Block, Op, parse_module
from warpattn.sim.link import link
from warpattn.sim.simulate import ttgir_of

LN_2 = math.log(2)
ARCHS = ("sm90", "sm100", "gfx942", "gfx950")
# Of values that are hidden Blackwell has tests of its own, sim/sm100/test_hidden_values.py.
DRAWN = [("sm90", "causal"), ("sm90", "one row"), ("gfx942", "one row, padded"), ("gfx950", "window")]
# Kernels that return no LSE move references later.
WITHOUT_LSE = [("sm90", "causal", False), ("sm90", "few rows", False)]


@pytest.mark.parametrize(
    ("arch", "call", "has_lse"),
    drawn(product(ARCHS, CALLS, [True, False]), [*((*each, True) for each in DRAWN), *WITHOUT_LSE]),
)
def test_kernels_follow_the_rule(arch, call, has_lse):
    assert not differences(arch, call, SPOILS, has_lse)


@pytest.mark.full
@pytest.mark.parametrize("has_lse", [True, False])
@pytest.mark.parametrize("call", drawn(EIGHT_BIT, ["products, padded"]))
def test_kernels_over_tensors_of_8_bits_follow_the_rule(call, has_lse):
    """Scales make large scores of them all, so those are drawn elsewhere."""
    assert not differences("sm90", call, [how for how in SPOILS if how != "large"], has_lse)


CDNA = ("gfx942", "gfx950")
HIDES = ("as drawn", "hidden", "partly hidden")
NARROW = [call for call, (_, stored) in EIGHT_BIT.items() if len(stored) == 2]  # beside queries of 16 bits


@pytest.mark.parametrize(
    ("arch", "call", "has_lse"), drawn(product(ARCHS, WIDE, [True, False]), [("gfx942", next(iter(WIDE)), True)])
)
def test_wide_heads_under_masks_of_indices_follow_the_rule(arch, call, has_lse):
    assert not differences(arch, call, HIDES, has_lse)


@pytest.mark.parametrize(("arch", "call"), drawn(product(CDNA, NARROW), [("gfx942", "converted, window, 256")]))
def test_cdna_over_keys_of_8_bits_follows_the_rule(arch, call):
    assert not differences(arch, call, HIDES)


LATENTS_DRAWN = [
    ("sm90", "8-bit latents, one row"),
    ("sm100", "8-bit latents, one row"),
    ("gfx942", "latents, one row"),
]


@pytest.mark.parametrize(
    ("arch", "call", "has_lse"),
    drawn(product(ARCHS, LATENTS, [True, False]), [(*each, True) for each in LATENTS_DRAWN]),
)
def test_kernels_over_latents_follow_the_rule(arch, call, has_lse):
    """A large latent would be a large value, too."""
    assert not differences(arch, call, [how for how in SPOILS if how != "large"], has_lse)


@pytest.mark.parametrize("call", drawn(["latents, window", "8-bit latents, one row"], ["8-bit latents, one row"]))
def test_a_second_pass_that_is_left_out_is_noticed(monkeypatch, call):
    whole = runtime._kernel
    monkeypatch.setattr(runtime, "_kernel", lambda launch: without_second_pass(whole(launch)))
    (wrong,) = differences("sm90", call, ["as drawn", "hidden"])
    assert wrong.startswith("hidden: out: ") and "differ in nan" in wrong


def without_second_pass(kernel):
    """A kernel that finds no row with NaN of a hidden latent."""
    module = link(parse_module(ttgir_of(kernel)))
    module.folded = getattr(kernel, "folded", {})
    for op in every_op(module.functions.values()):
        if op.name == "arith.cmpi" and op.frames and "gl.max(gl.max(some." in linecache.getline(*op.frames[0]):
            op.run = lambda x, y: False
    return module


def every_op(blocks: Iterable[Block]) -> Iterator[Op]:
    for block in blocks:
        for op in block.ops:
            yield op
            yield from every_op(op.regions)


# Of q and of k.
MAGNITUDES = [(1e30, 1.0), (1e-30, 1e30), (1e19, 1e19), (2e18, 2e18), (3e38, 1e-2), (1e-10, 1e-10), (1e-38, 1e-38)]
SCALES = (None, 1.0, 3e38, -1e-30)


@pytest.mark.parametrize("arch", drawn(ARCHS, ["sm90", "gfx942"]))
def test_finite_where_the_reference_is(arch):
    """In rows whose products and scores fit fp32, in whatever order the products are added."""
    finfo, rows = torch.finfo(torch.bfloat16), 0
    for (of_q, of_k), scale in product(MAGNITUDES, SCALES):
        q, k = (torch.randn(1, n, 2, 64).mul(x).clamp(finfo.min, finfo.max) for n, x in ((16, of_q), (20, of_k)))
        q, k, v = q.bfloat16(), k.bfloat16(), torch.randn(1, 20, 2, 64).bfloat16()
        out, lse = wa.attention(q, k, v, scale=scale, return_lse=True, backend=f"simulate:{arch}")
        expected = wa.attention(q, k, v, scale=scale)
        sums = torch.einsum("bqhd,bkhd->bqhk", q.double().abs(), k.double().abs()).amax(-1)
        largest = sums * max(1.0, abs(64**-0.5 if scale is None else scale))
        fits = (largest < torch.finfo(torch.float32).max)[..., None]
        rows += int(fits.sum())
        assert bool((out.isfinite() & expected.isfinite() | ~fits).all()), (of_q, of_k, scale)
        torch.testing.assert_close(out.where(fits, 0.0), expected.where(fits, 0.0), atol=2e-2, rtol=2e-2)
        assert bool((lse.isfinite() | ~fits[..., 0].transpose(1, 2)).all())
    assert rows > 16 * len(MAGNITUDES) * len(SCALES)


# Tokens, keys, heads, key heads, head dims.
SIZES = {
    "decode": (1, 700, 4, 4, 64, 64),
    "combined later": (1, 3000, 16, 1, 128, 128),
    "few": (4, 300, 8, 1, 128, 128),
    "prefill": (70, 200, 2, 2, 64, 64),
}
WIDE_SIZES = {"192/128": (70, 100, 2, 2, 192, 128), "256": (70, 100, 1, 1, 256, 256)}


@pytest.mark.parametrize("scale", [1.0, 1.4])
@pytest.mark.parametrize("size", drawn([*SIZES, *WIDE_SIZES], ["decode", "prefill"]))
@pytest.mark.parametrize("arch", drawn(ARCHS, ["sm90"]))
def test_scores_up_to_the_largest_number(arch, size, scale):
    """Two keys of a row share its largest score, whose exponent in base 2 is no fp32 number."""
    tokens, keys, heads, heads_kv, dim, dim_v = (SIZES | WIDE_SIZES)[size]
    q, k = torch.zeros(1, tokens, heads, dim), torch.zeros(1, keys, heads_kv, dim)
    q[..., 0] = 2.0**63
    k[0, :, :, 0] = torch.randint(64, 250, (keys, heads_kv)) * 2.0**57 / scale
    k[0, [5, keys - 3], :, 0] = 255 * 2.0**57 / scale
    q, k, v = q.bfloat16(), k.bfloat16(), torch.randn(1, keys, heads_kv, dim_v).bfloat16()
    out, lse = wa.attention(q, k, v, scale=scale, return_lse=True, backend=f"simulate:{arch}")
    share = v[:, [5, keys - 3]].float().mean(1, keepdim=True).repeat_interleave(heads // heads_kv, 2)
    torch.testing.assert_close(out.float(), share.expand(out.shape), atol=2e-3, rtol=8e-3)
    torch.testing.assert_close(lse, torch.full_like(lse, 255 * 2.0**120), rtol=1e-2, atol=0)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("arch", drawn(ARCHS, ["sm90", "gfx950"]))
def test_keys_of_one_extreme_score_in_parts_count_alike(arch, sign):
    """One row whose keys all have the lowest, or the largest, number as score gets their mean, also where parts of them
    are combined, one of which has fewer keys than the others."""
    for keys in (1024, 700):
        q, k, v = (torch.randn(1, *shape, 64).half() for shape in ((1, 4), (keys, 1), (keys, 1)))
        extreme = wa.Bias(torch.full((1, 4, 1, keys), -sign * LOWEST))
        out, lse = wa.attention(q, k, v, score=extreme, return_lse=True, backend=f"simulate:{arch}")
        torch.testing.assert_close(out, v.float().mean(1, keepdim=True).expand(1, 1, 4, 64).half(), atol=2e-3, rtol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, -sign * LOWEST))


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx950"]))
def test_the_largest_sinks_of_keys_in_parts(arch):
    """They take all of the weight; an infinity is NaN."""
    q, k, v = torch.randn(1, 1, 4, 64).half(), torch.randn(1, 1024, 1, 64).half(), torch.randn(1, 1024, 1, 64).half()
    sinks = torch.tensor([-LOWEST, 3e38, torch.inf, LOWEST])
    out, lse = wa.attention(q, k, v, sinks=sinks, return_lse=True, backend=f"simulate:{arch}")
    assert (out[0, 0, :2] == 0).all()
    torch.testing.assert_close(lse[0, :2, 0], sinks[:2])
    assert out[0, 0, 2].isnan().all() and lse[0, 2].isnan().all()
    plain, plain_lse = wa.attention(q, k, v, return_lse=True, backend="reference")
    torch.testing.assert_close(out[0, 0, 3], plain[0, 0, 3], atol=2e-3, rtol=0)
    torch.testing.assert_close(lse[0, 3], plain_lse[0, 3], atol=2e-3, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("arch", drawn(["sm90", "sm100"], ["sm90"]))
def test_large_scores_of_products_of_8_bits(arch):
    """Of keys of one score every value gets its share, up to the rounding of weights that e4m3 has not: on Hopper up to
    exponents of 2^26, on Blackwell, and with any score function on Hopper, for all."""
    steps, heads = torch.arange(256.0, 449.0, 32.0), 14
    v = wa.quantize(torch.randn(1, 70, heads // 2, 64), per="head")
    share = v.dequantized().mean(1, keepdim=True).repeat_interleave(2, 2)
    q, k = torch.zeros(1, 64, heads, 64), torch.zeros(1, 70, heads // 2, 64)
    q[..., :2] = steps[torch.randint(0, 7, (64, heads, 2))]  # the significant bits of a score are any
    k[..., 0], k[..., 1] = steps, steps.flip(0)
    made = [wa.Quantized(q.to(torch.float8_e4m3fn), torch.rand(heads) + 1)]
    made += [wa.Quantized(k.to(torch.float8_e4m3fn), torch.ones(())), v]
    largest = float((made[0].dequantized()[..., :2].sum(-1) * 448).max()) / LN_2
    for exponent, score in ((2.0**26, None), (2.0**27, wa.SoftCap(1e30)), (2.0**29, None)):
        if arch == "sm90" and score is None and exponent > 2.0**26:
            continue
        out = wa.attention(*made, scale=exponent / largest, score=score, backend=f"simulate:{arch}").float()
        assert bool(((out - share).norm(dim=-1) <= 2.0**-4 * share.norm(dim=-1)).all())


@pytest.mark.parametrize("arch", drawn(["sm90", "sm100"], ["sm90"]))
def test_gradients_of_large_scores(arch):
    """The weights of a row are made of its LSE, so its last bit is a factor of all of them; where the LSE has no digit
    for the number of keys, they are 1."""
    scores = torch.tensor([0.0, 2.0**14, 2.0**20 - 9, 2.0**22, -(2.0**24), 2.0**30, -(2.0**30), LOWEST])
    keys, heads = 70, len(scores)
    q, k, v = torch.zeros(1, 64, heads, 64), torch.zeros(1, keys, heads, 64), torch.randn(1, keys, heads, 64)
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    same = wa.CustomScore(lambda s, b, h, i, j, each: s + each[h], each=scores)
    out, dout = wa.attention(q, k, v, score=same, backend=f"simulate:{arch}"), torch.randn(1, 64, heads, 64).bfloat16()
    torch.testing.assert_close(out, v.float().mean(1, keepdim=True).expand_as(out).bfloat16(), atol=4e-3, rtol=0)
    (dv,) = torch.autograd.grad(out, v, dout)
    exact = dout.float().sum(1, keepdim=True).expand_as(dv) / keys
    factor = (dv.float().norm(dim=(1, 3)) / exact.norm(dim=(1, 3)))[0].tolist()
    for score, found in zip(scores[:5].tolist(), factor, strict=False):
        assert abs(math.log(found)) <= max(4e-3, abs(score) * 2.0**-23), (score, found)
    assert factor[5:] == pytest.approx([keys] * 3, rel=1e-2)


@pytest.mark.parametrize("arch", drawn(ARCHS, ["sm90"]))
def test_scales_of_values_beside_large_scores(arch):
    """Where a value's scale is part of its weight's exponent, as on Hopper, a score beyond 2^24 leaves it no digit; the
    others round a value with its scale to bf16."""
    stored = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    q, k, v = torch.zeros(1, 1, 8, 64), torch.zeros(1, 300, 1, 64), torch.randn(1, 300, 1, 64)
    q[..., 0], k[..., 0], v = 1.0, 3.0, v * torch.logspace(-3, 3, 300)[:, None, None]
    call = q.bfloat16(), wa.quantize(k, stored, per="token"), wa.quantize(v, stored, per="token")
    out = wa.attention(*call, score=wa.SoftCap(1e30), scale=1e30, backend=f"simulate:{arch}")
    expected = wa.attention(*call, score=wa.SoftCap(1e30), scale=1e30)
    assert float((out - expected).float().norm() / expected.float().norm()) < 2.0**-7
    if arch == "sm90":
        torch.testing.assert_close(out, expected, atol=4e-3, rtol=8e-3)


@pytest.mark.parametrize("backend", ["reference", *drawn(("simulate:sm90", "simulate:sm100"), ()), "simulate:gfx942"])
def test_nan_in_a_mask_that_is_added_is_no_hidden_key(backend: str) -> None:
    """A score of NaN: its row is NaN, as with torch's own attention, and no other is."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 70, 2, 32).half(), torch.randn(1, 80, 1, 32).half(), torch.randn(1, 80, 1, 32).half()
    bias = torch.randn(1, 1, 70, 80).half()
    bias[..., 5, 3], bias[..., 9, 7], bias[..., 11, :] = torch.nan, -torch.inf, -torch.inf
    out, lse = wa.attention(q, k, v, mask=wa.Materialized(bias), return_lse=True, backend=backend)
    rows = torch.arange(70) == 5
    assert torch.equal(out.isnan().any(-1).any(-1)[0], rows) and torch.equal(lse.isnan().any(1)[0], rows)
    assert not out[0, 11].any()
