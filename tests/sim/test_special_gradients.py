"""Keys and values that are NaN or infinite reach the gradients of what sees them and no others, whatever hides them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.sim.backward import Case
from tests.sim.special_gradients import SPOILS, differences
from warpattn.masks import Causal, CustomMask, Materialized, Padding, SlidingWindow

HOLES = CustomMask(lambda b, h, q, k: (k % 3 != 1) & (q < k + 80))
SCATTERED = torch.rand(1, 1, 100, 200, generator=torch.Generator().manual_seed(1)) < 0.3
SCATTERED[..., 170:] = False
WINDOW = Case(140, 300, mask=SlidingWindow(70, 10))  # no row sees the first keys
CAUSAL = Case(200, 300, heads=2, mask=Causal(top_left=True))  # nor here the last ones
LENGTHS = ((20, 40), (140, 300))
WIDE = {
    "window, 192/128": replace(WINDOW, dim=192, dim_v=128),
    "window, 192/128, ragged": replace(WINDOW, dim=192, dim_v=128, lengths=LENGTHS, deterministic=True),
    "window, 256": replace(WINDOW, dim=256),
    "holes, 256": Case(100, 200, dim=256, mask=HOLES),
}
CASES = {
    "window": replace(WINDOW, deterministic=True),
    "window, 96": replace(WINDOW, dim=96),
    "window, 128": replace(WINDOW, dim=128, heads=2, dtype=torch.float16),
    "window, ragged": replace(WINDOW, lengths=LENGTHS, heads=2, heads_kv=2),
    "causal": CAUSAL,
    "causal, 128": replace(CAUSAL, dim=128),
    "padding": Case(100, 200, batch=2, dim=128, mask=Padding(torch.tensor([150, 40]))),
    "holes": Case(100, 200, mask=HOLES),
    "scattered": Case(100, 200, mask=Materialized(SCATTERED)),
}
EVERY = [(arch, name) for arch in ("sm90", "sm100") for name in [*CASES, *WIDE]]
EVERY += [(arch, name) for arch in ("gfx942", "gfx950") for name in CASES]
DRAWN = [
    ("sm90", "window"),
    ("gfx950", "causal"),
]


@pytest.mark.parametrize(("arch", "name"), drawn(EVERY, DRAWN))
def test_what_is_not_finite_reaches_what_sees_it_alone(arch: str, name: str) -> None:
    case = replace((CASES | WIDE)[name], arch=arch)
    found = {how: differences(case, how) for how in SPOILS}
    assert {how: wrong for how, wrong in found.items() if wrong} == {}
