"""The Hopper kernels against plain PyTorch: every mask, score and sink, head dims, lengths, heads, layouts, dtypes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import warpattn as wa
from tests.cases import Case, every_combination, kernel_cases
from tests.oracle import Inputs, check, poisoned

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
DIMS = (64, 128, 256)
BASE = Case(batch=2, seq_q=200, seq_k=333, heads_q=4, heads_kv=2, dim=128, dtype=torch.bfloat16, mask="causal")


def attend(inputs: Inputs, has_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Out, written over NaN, and lse or None."""
    dim_v = inputs.v.shape[-1]
    out = poisoned((*inputs.q.shape[:-1], dim_v), inputs.q.dtype, inputs.q.device)
    result = wa.attention(
        inputs.q,
        inputs.k,
        inputs.v,
        mask=inputs.mask,
        score=inputs.score,
        sinks=inputs.sinks,
        scale=inputs.scale,
        return_lse=has_lse,
        out=out,
        backend="sm90",
    )
    result, lse = result if isinstance(result, tuple) else (result, None)
    assert result is out and (lse is not None) is has_lse
    return out, lse


def check_case(case: Case) -> None:
    inputs = case.build("cuda")
    out, lse = attend(inputs, case.has_lse)
    check(inputs, out, lse)


def named(cases: list[Case]) -> list[object]:
    return [pytest.param(case, id=case.name) for case in dict.fromkeys(cases)]


@pytest.mark.parametrize("case", named([case for dim in DIMS for dtype in DTYPES for case in kernel_cases(dim, dtype)]))
def test_kernel_cases(case):
    check_case(case)


SWEEP = [replace(BASE, dim=dim, mask=mask) for dim in range(8, 257, 8) for mask in ("full", "causal")]
SWEEP += [replace(BASE, dim=dim, dtype=torch.float16, seq_q=129, seq_k=65) for dim in range(8, 257, 8)]


@pytest.mark.parametrize("case", named(SWEEP))
def test_every_head_dim(case):
    check_case(case)


PAIRS = [(192, 128), (128, 192), (64, 128), (128, 64), (8, 256), (256, 8), (96, 40), (40, 96), (72, 64), (256, 128)]


@pytest.mark.parametrize("case", named([replace(BASE, dim=d, dim_v=v, sinks=True) for d, v in PAIRS]))
def test_values_may_have_another_head_dim(case):
    check_case(case)


HALF_TILES = [  # of 64 rows, between one and two for every SM
    replace(BASE, batch=1, seq_q=rows, seq_k=rows, heads_q=64, heads_kv=heads, dim=dim)
    for rows, heads in ((300, 64), (200, 8))
    for dim in (64, 96, 128)
]


@pytest.mark.parametrize("case", named(HALF_TILES))
def test_two_ctas_an_sm(case):
    check_case(case)


ABOVE_256 = [replace(BASE, dim=dim, mask=mask) for dim in (264, 320, 416, 512) for mask in ("full", "causal")]
ABOVE_256 += [replace(BASE, dim=d, dim_v=v, sinks=True) for d, v in ((512, 64), (64, 512), (320, 264))]
ABOVE_256 += [
    replace(BASE, dim=512, seq_q=60, seq_k=8000),  # keys in parts
    replace(BASE, dim=512, dtype=torch.float16, mask="causal-window", score="softcap", heads_q=8),
    replace(BASE, dim=512, batch=3, seq_q=1500, seq_k=1500, heads_q=16, heads_kv=4),  # many tiles a CTA
]


@pytest.mark.parametrize("case", named(ABOVE_256))
def test_head_dims_above_256(case):
    """Values of more than 256 columns have two launches."""
    check_case(case)


LENGTHS = [(n, n) for n in (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 383, 384, 385)]
LENGTHS += [(1, 4096), (4096, 1), (3, 1000), (1000, 3), (129, 2000), (2000, 129), (2500, 2500), (64, 8192)]


@pytest.mark.parametrize(
    "case",
    named(
        [
            replace(BASE, dim=dim, seq_q=q, seq_k=k, mask=mask)
            for dim in DIMS
            for q, k in LENGTHS
            for mask in ("full", "causal")
        ]
    ),
)
def test_every_length(case):
    check_case(case)


# Many tiles per CTA, so that the scheduler hands out most of them; sections of heads that do not fit in L2 together.
LARGE = [
    replace(BASE, batch=4, seq_q=1024, seq_k=1024, heads_q=32, heads_kv=32, mask="full"),
    replace(BASE, batch=3, seq_q=3000, seq_k=3000, heads_q=24, heads_kv=3),
    replace(BASE, batch=1, seq_q=16384, seq_k=16384, heads_q=4, heads_kv=2),
    replace(BASE, batch=1, seq_q=16384, seq_k=16384, heads_q=4, heads_kv=1, mask="causal-window"),
    replace(BASE, batch=2, seq_q=4096, seq_k=4096, heads_q=16, heads_kv=16, dim=64),
    replace(BASE, batch=2, seq_q=2048, seq_k=2048, heads_q=32, heads_kv=8, dim=64, dtype=torch.float16),
    replace(BASE, batch=1, seq_q=4096, seq_k=4096, heads_q=16, heads_kv=16, dim=256),
    replace(BASE, batch=40, seq_q=333, seq_k=555, heads_q=12, heads_kv=4, dim=64, mask="documents"),
    replace(BASE, batch=64, seq_q=1, seq_k=777, heads_q=8, heads_kv=1),
]


@pytest.mark.parametrize("case", named(LARGE))
def test_many_tiles(case):
    check_case(case)


SCALES = [
    replace(BASE, scale=scale, dim=64, mask=mask)
    for scale in (0.0, -0.3, 1e-40, 1.0, 1e-3)
    for mask in ("full", "causal")
]
SCALES += [replace(BASE, scale=-0.5, dim=64, sinks=True, score="alibi"), replace(BASE, scale=0.0, dim=64, sinks=True)]


@pytest.mark.parametrize("case", named(SCALES))
def test_every_scale(case):
    check_case(case)


@pytest.mark.parametrize("case", named(every_combination(replace(BASE, dim=192, dim_v=128, seq_q=500, seq_k=500))))
def test_combinations_at_another_head_dim(case):
    check_case(case)


def test_large_scores_stay_finite():
    """Scores of thousands: exp2 of differences only; the first keys are far below the later ones and back."""
    case = replace(BASE, seq_q=300, seq_k=700, dim=64, mask="full")
    inputs = case.build("cuda")
    ramp = torch.linspace(-40, 40, 700, device="cuda").sin().mul(30).to(torch.bfloat16)
    inputs = replace(inputs, k=inputs.k * ramp[None, :, None, None], q=inputs.q * 8)
    out, lse = attend(inputs)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    truth = wa.attention(*(x.double() for x in (inputs.q, inputs.k, inputs.v)), backend="reference")
    assert (out.double() - truth).abs().max() < 0.05


def test_sinks_in_the_dtype_of_q():
    inputs = replace(BASE, sinks=True, dim=64).build("cuda")
    assert inputs.sinks is not None
    inputs = replace(inputs, sinks=inputs.sinks.to(torch.bfloat16))
    out, lse = attend(inputs)
    check(inputs, out, lse)
    strided = torch.stack((inputs.sinks, inputs.sinks), dim=1)[:, 1]
    out, lse = attend(replace(inputs, sinks=strided))
    check(inputs, out, lse)


@pytest.mark.parametrize("sinks", [False, True])
def test_without_keys(sinks):
    inputs = replace(BASE, seq_q=70, seq_k=0, sinks=sinks).build("cuda")
    out, lse = attend(inputs)
    assert (out == 0).all()
    expected = torch.full_like(lse, -torch.inf) if inputs.sinks is None else inputs.sinks[None, :, None].expand_as(lse)
    assert torch.equal(lse, expected)


def test_without_queries():
    inputs = replace(BASE, seq_q=0, seq_k=70).build("cuda")
    out, lse = attend(inputs)
    assert out.shape == (2, 0, 4, 128) and lse.shape == (2, 4, 0)


WIDTHS = (32, 64, 80, 96, 112, 128, 160, 208, 256, 320)
HIDDEN = [replace(BASE, dim=dim, seq_q=300, mask=mask) for dim in WIDTHS for mask in ("causal", "window")]
HIDDEN += [replace(BASE, dim=dim, seq_q=300, heads_q=16, dtype=torch.float16) for dim in (64, 128)]
HIDDEN += [replace(BASE, dim=192, dim_v=128, seq_q=300, mask="causal")]


@pytest.mark.parametrize("case", named(HIDDEN))
def test_values_that_a_row_does_not_see_do_not_reach_it(case):
    inputs = case.build("cuda")
    inputs.v[:, 290:], inputs.v[:, 120, :, 3], inputs.v[:, 130, :, 4] = torch.nan, torch.inf, -torch.inf
    out, _ = attend(inputs, case.has_lse)
    expected = wa.attention(inputs.q, inputs.k, inputs.v, mask=inputs.mask, scale=inputs.scale, backend="reference")
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-2, rtol=2e-2, equal_nan=True)
    assert expected.isnan().any() and expected.isinf().any() and expected.isfinite().any()
