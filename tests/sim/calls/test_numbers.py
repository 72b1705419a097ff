"""Special values in simulated kernels of every architecture, against an oracle that knows nothing of tiles; and rows
whose reference maxima move in Hopper's prefill, where weights made before a tile's maximum is known are made again."""

import linecache
import math
import re
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

import warpattn as wa
from tests.drawn import drawn
from tests.specials import CALLS, EIGHT_BIT, LATENTS, LOWEST, SPOILS, WIDE, differences
from warpattn.runtime import simulate as runtime
from warpattn.sim.ir.module import Block, Op, parse_module
from warpattn.sim.link import link
from warpattn.sim.ops import asm
from warpattn.sim.simulate import linked, ttgir_of

LN_2 = math.log(2)
KEYS, TILE = 512, 128  # no key tile is masked, so all are visited in order
ARCHS = ("sm90", "sm100", "gfx942", "gfx950")
# Of values that are hidden Blackwell has tests of its own, sim/sm100/test_hidden_values.py.
DRAWN = [("sm90", "causal"), ("sm90", "one row"), ("gfx942", "one row, padded"), ("gfx950", "window")]


def kinds_of(arch: str, call: str) -> list[str]:
    """Kinds of special values, without large scores where docs/numbers.md says that Hopper rounds them."""
    plain = arch == "sm90" and CALLS[call].score == "none"
    return [how for how in SPOILS if not (plain and how == "large")]


@pytest.mark.parametrize(("arch", "call"), drawn(product(ARCHS, CALLS), DRAWN))
def test_kernels_follow_the_rule(arch, call):
    assert not differences(arch, call, kinds_of(arch, call))


@pytest.mark.full
@pytest.mark.parametrize("call", drawn(EIGHT_BIT, ["products, padded"]))
def test_kernels_over_tensors_of_8_bits_follow_the_rule(call):
    """Scales make large scores of them all, so those are drawn elsewhere."""
    assert not differences("sm90", call, [how for how in SPOILS if how != "large"])


CDNA = ("gfx942", "gfx950")
HIDES = ("as drawn", "hidden", "partly hidden")
NARROW = [call for call, (_, stored) in EIGHT_BIT.items() if len(stored) == 2]  # beside queries of 16 bits


@pytest.mark.parametrize(("arch", "call"), drawn(product(ARCHS, WIDE), [("gfx942", next(iter(WIDE)))]))
def test_wide_heads_under_masks_of_indices_follow_the_rule(arch, call):
    assert not differences(arch, call, HIDES)


@pytest.mark.parametrize(("arch", "call"), drawn(product(CDNA, NARROW), [("gfx942", "converted, window, 256")]))
def test_cdna_over_keys_of_8_bits_follows_the_rule(arch, call):
    assert not differences(arch, call, HIDES)


LATENTS_DRAWN = [
    ("sm90", "8-bit latents, one row"),
    ("sm100", "8-bit latents, one row"),
    ("gfx942", "latents, one row"),
]


@pytest.mark.parametrize(("arch", "call"), drawn(product(ARCHS, LATENTS), LATENTS_DRAWN))
def test_kernels_over_latents_follow_the_rule(arch, call):
    """A large latent would be a large value, too."""
    assert not differences(arch, call, [how for how in SPOILS if how != "large"])


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


def growing(dim: int, exponents: float, dtype: torch.dtype, down: bool) -> tuple[torch.Tensor, ...]:
    """q, k, v of one head: the largest weight of a tile of keys is 2^`exponents` times that of the tile before, or with
    `down` of the tile behind."""
    chance = torch.Generator().manual_seed(dim)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=chance)

    line = draw(dim)
    line /= line.norm()
    sizes = (torch.arange(KEYS).flip(0) if down else torch.arange(KEYS)) / TILE * exponents * dim**0.5 / 1.4427 / 8
    q, k = 8 * line + draw(90, dim) / 20, sizes[:, None] * line + draw(KEYS, dim) / 20
    return tuple(x.to(dtype)[None, :, None] for x in (q, k, draw(KEYS, dim)))


def weighed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The output in fp64, with weights rounded to `dtype`, and the LSE."""
    q, k, v = (x[0, :, 0].double() for x in (q, k, v))
    s = q @ k.T * q.shape[1] ** -0.5
    return torch.softmax(s, -1).to(dtype).double() @ v, torch.logsumexp(s, -1)


@pytest.mark.parametrize("dtype", drawn([torch.float16, torch.bfloat16], [torch.float16]), ids=str)
@pytest.mark.parametrize(
    ("dim", "scored"), drawn(product([64, 128, 192, 256], [False, True]), [(128, False), (192, True)])
)
@pytest.mark.parametrize("exponents", [12.0, 16.5, 140.0])
@pytest.mark.parametrize("down", [False, True])
def test_weights_that_grow(down: bool, exponents: float, dim: int, scored: bool, dtype: torch.dtype) -> None:
    """Up to 2^15 a sum stays; above, references move; 2^140 is no fp32. `scored`: by a function that changes none."""
    q, k, v = growing(dim, exponents, dtype, down)
    score = wa.ALiBi(torch.zeros(1)) if scored else None
    out, lse = wa.attention(q, k, v, score=score, return_lse=True, backend="simulate:sm90")
    exact, logsum = weighed(q, k, v, torch.float64)
    rounded, _ = weighed(q, k, v, dtype)
    allowed = 4 * (rounded - exact).abs().max()
    assert (out[0, :, 0].double() - exact).abs().max() <= allowed
    assert (lse.flatten().double() - logsum).abs().max() <= 1e-6 * logsum.abs().max()


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("arch", "dim"),
    drawn(
        [*(("sm90", dim) for dim in (64, 128, 192, 256)), *(("sm100", dim) for dim in (64, 128, 256)), ("gfx942", 64)],
        [("sm90", 64), ("sm90", 128), ("sm100", 128), ("sm100", 256)],
    ),
)
def test_a_key_with_all_the_weight_gives_its_value(arch: str, dim: int, dtype: torch.dtype, scored: bool) -> None:
    """Correctly rounded, whatever its tile: else the rounding of its weight would multiply a row of the output, and the
    gradient of q, which is small there, would lose its digits."""
    torch.manual_seed(0)
    exponents = torch.linspace(6.1, 15.9, 90) * dim**0.5 / 1.4427
    q, k, v = torch.zeros(90, dim), torch.zeros(KEYS, dim), torch.randn(KEYS, dim)
    q[:, 0], q[:, 1], k[300, 0], k[:, 1] = exponents, 100.0 * dim**0.5, 1.0, -1.0
    k[[5, 300, 500], 1] = 0.0  # all others have no weight
    q, k, v = (x.to(dtype) for x in (q, k, v))
    score = wa.ALiBi(torch.zeros(1)) if scored else None
    q, k, v = (x[None, :, None] for x in (q, k, v))
    out, _ = wa.attention(q, k, v, score=score, return_lse=True, backend=f"simulate:{arch}")
    exact = wa.attention(*(x.double() for x in (q, k, v)), backend="reference")
    assert (out != exact.to(dtype)).double().mean() < 0.01


@pytest.mark.parametrize("score", [2.0**22, 1.2e7, 9.4e7, -9.4e7, 1e9, 2.0**100])
@pytest.mark.parametrize("dim", drawn([64, 128, 192, 256], [192]))
def test_scores_of_a_function_may_have_any_size(dim: int, score: float) -> None:
    """Rows of one score; where scores are subtracted before they are multiplied, the first key has 8 more, or as little
    more as fp32 has. And, in another call, rows whose largest scores are in the first tile of keys or in the last."""
    torch.manual_seed(dim)
    q, k, v = (torch.randn(1, n, 1, dim).bfloat16() for n in (90, 400, 400))
    still, moving = torch.full((90, 400), score), torch.full((90, 400), -abs(score))
    if abs(score) > 2.0**27 * LN_2:
        still[:, 1:] = min(score - 8.0, float(torch.tensor(score).nextafter(torch.tensor(-math.inf))))
    moving[:45, :40] = moving[45:, 360:] = abs(score)
    for bias in (still, moving):
        added = wa.Bias(bias[None, None])
        found, lse = wa.attention(q * 0.0, k, v, score=added, return_lse=True, backend="simulate:sm90")
        exact = bias.double().softmax(-1) @ v[0, :, 0].double()
        torch.testing.assert_close(found[0, :, 0].double(), exact, atol=8e-3, rtol=8e-3)
        torch.testing.assert_close(lse.flatten(), bias.amax(-1).flatten(), atol=8.0, rtol=1e-6)


@pytest.mark.parametrize("dim", drawn([64, 128, 256], [128]))
@pytest.mark.parametrize("down", [False, True])
def test_bits_of_a_row_depend_on_its_own_scores(down: bool, dim: int) -> None:
    """Not on the other rows of a warp, whose references move."""
    q, k, v = growing(dim, 20.0, torch.bfloat16, down)
    q[:, 5] *= 0.02  # its largest score grows a little with each tile
    still = torch.zeros_like(q)
    still[:, 5] = q[:, 5]
    moving, alone = (wa.attention(x, k, v, return_lse=True, backend="simulate:sm90") for x in (q, still))
    assert torch.equal(moving[0][:, 5], alone[0][:, 5]) and torch.equal(moving[1][..., 5], alone[1][..., 5])
    assert not torch.equal(moving[0][:, 4], alone[0][:, 4])


@pytest.fixture(name="voters")
def counted_voters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Warps whose votes count, while there are some; else all do, as always in the simulator, which takes a role as a
    unit."""
    voters: list[int] = []

    def vote(task: Any, match: re.Match[str], x: np.ndarray, bound: np.ndarray) -> Any:
        warps = (x > bound).reshape(4, -1).any(1)
        return int(bool(warps[voters or ...].any()))
        yield

    handlers = [(pattern, vote if run is asm._vote_any_greater else run) for pattern, run in asm._WHOLE]
    monkeypatch.setattr(asm, "_WHOLE", handlers)
    linked.cache_clear()
    yield voters
    linked.cache_clear()


ALONE = [(64, False), (192, True)]


@pytest.mark.parametrize(("dim", "scored"), drawn(product([64, 128, 192, 256], [False, True]), ALONE))
def test_a_warp_that_branches_alone(voters: list[int], dim: int, scored: bool) -> None:
    """Its rows have the same bits as if the other warps did what it does."""
    q, k, v = growing(dim, 40.0, torch.bfloat16, True)
    q *= torch.tensor([1.0, 0.2, 0.02, 0.6, 0.0, 0.4]).repeat_interleave(16)[:90, None, None]
    score = wa.ALiBi(torch.zeros(1)) if scored else None

    def same(warp: int) -> torch.Tensor:
        voters[:] = [warp]
        found = wa.attention(q, k, v, score=score, return_lse=True, backend="simulate:sm90")
        return (found[0] == out).all(-1).flatten() & (found[1] == lse).flatten()

    out, lse = wa.attention(q, k, v, score=score, return_lse=True, backend="simulate:sm90")
    warps = torch.arange(90) % 64 // 16
    alike = [same(warp) for warp in range(4)]
    assert all(rows[warps == warp].all() for warp, rows in enumerate(alike))
    assert not alike[2].all()  # its rows never move, others have to
