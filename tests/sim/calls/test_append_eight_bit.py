"""New keys and values into pages of 8 bits: torch against `quantize`, the kernels in the simulator against torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.sim.calls.test_append import tables
from warpattn.errors import AttentionError
from warpattn.kernels.cache.launch import NewRows, append_launches, slot_launches
from warpattn.quantized import quantize
from warpattn.runtime.simulate import Options, run_launch
from warpattn.sequences import PagedKV
from warpattn.serving import append_paged, append_slots

E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
TABLE, LENGTHS = torch.tensor([[3, 1], [0, 5]]).int(), torch.tensor([6, 3]).int()
PLACES = ([3, 1, 1, 0, 0, 0], [3, 0, 1, 0, 1, 2])  # pages and rows of two sequences' three new tokens
SLOTS = torch.tensor([15, 4, 5, 0, 1, 2, -1])


def scale(per: str | int | None, dim: int) -> torch.Tensor | None:
    if isinstance(per, int):
        return torch.zeros(6, 4, 2, dim // per)
    return {None: None, "tensor": torch.tensor(0.37), "head": torch.tensor([0.3, 0.01]), "token": torch.zeros(6, 4, 2)}[
        per
    ]


def cache(dtype: torch.dtype, per: str | int | None, dim: int = 64) -> list[torch.Tensor | None]:
    """k_pages, v_pages, k_scale, v_scale."""
    pages = (torch.zeros(6, 4, 2, dim).to(dtype) for _ in range(2))
    return [*pages, scale(per, dim), scale(per, dim)]


def new_rows(dtype: torch.dtype, dim: int = 64) -> list[torch.Tensor]:
    """Keys that some of the scales saturate, a row of zeros, and one with NaN and infinity."""
    torch.manual_seed(0)
    k, v = (torch.randn(2, 3, 2, dim) * size for size in (100, 1))
    k[0, 0], v[0, 1, 0, :2] = 0, torch.tensor([float("nan"), float("inf")])
    return [k.to(dtype), v.to(dtype)]


def same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None]
    return all(torch.equal(a.float().nan_to_num(-1.0), b.float().nan_to_num(-1.0)) for a, b in pairs)


@pytest.mark.parametrize("per", [None, "tensor", "head", "token"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, FNUZ], ids=str)
def test_torch_quantizes(dtype, per):
    found, rows = cache(dtype, per), new_rows(torch.bfloat16)
    append_paged(found[0], found[1], TABLE, LENGTHS, *rows, k_scale=found[2], v_scale=found[3])
    for pages, own, x in zip(found[:2], found[2:], rows, strict=True):
        given = None if per == "token" else torch.ones(()) if own is None else own
        made = quantize(x.flatten(0, 1), dtype, per="token", scale=given)
        assert same([pages[PLACES]], [made.values]) and int((pages.float() != 0).any(-1).sum()) <= 12
        if per == "token":
            assert torch.equal(own[PLACES], made.scale)
    slots = cache(dtype, per)
    flat = [torch.cat([x.flatten(0, 1), x[0]]) for x in rows]
    append_slots(*flat, slots[0], slots[1], SLOTS, k_scale=slots[2], v_scale=slots[3])
    assert same(slots, found)


CASES = [
    ("sm90", E4M3, "token"), ("sm90", E5M2, "head"), ("sm90", E4M3, None), ("gfx942", FNUZ, "tensor"),
    ("gfx950", E4M3, "token"), ("sm100", E4M3, "tensor"), ("sm90", E4M3, 64), ("sm100", E5M2, 128),
    ("gfx942", FNUZ, 64),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "dtype", "per"), drawn(CASES, [CASES[0], CASES[3], CASES[6]]), ids=str)
def test_kernels(arch, dtype, per):
    """With rotated keys, as torch writes them; a place for each token, and one for none."""
    dim = 3 * per if isinstance(per, int) else 64
    rows, angles = new_rows(torch.bfloat16, dim), tables(32)
    expected, found, slots = (cache(dtype, per, dim) for _ in range(3))
    named = {"cos": angles[0], "sin": angles[1]}
    append_paged(expected[0], expected[1], TABLE, LENGTHS, *rows, **named, k_scale=expected[2], v_scale=expected[3])
    kv = PagedKV(found[0], found[1], TABLE, LENGTHS, k_scale=found[2], v_scale=found[3])
    (launch,) = append_launches(arch, kv, NewRows(*rows, angles, False))
    report = run_launch(launch, Options())
    assert report.clean and same(found, expected), report
    positions = torch.tensor([3, 4, 5, 0, 1, 2, 0])
    flat = [torch.cat([x.flatten(0, 1), x[0]]) for x in rows]
    new = NewRows(*flat, angles, False, (slots[2], slots[3]))
    (launch,) = slot_launches(arch, (slots[0], slots[1]), SLOTS, positions, new)
    assert run_launch(launch, Options()).clean and same(slots, expected)


def test_bad_input():
    pages, rows = cache(E4M3, "head"), new_rows(torch.float32)

    def refused(message: str, k_pages=pages[0], v_pages=pages[1], **scales) -> None:
        with pytest.raises(AttentionError, match=message):
            append_paged(k_pages, v_pages, TABLE, LENGTHS, *rows, **scales)

    refused("v_pages has dtype torch.float8_e5m2; it must be that of k_new", v_pages=pages[1].to(E5M2))
    refused("k_pages has dtype torch.float32, and scales belong", pages[0].float(), pages[1].float(), k_scale=pages[2])
    refused(r"k_scale has shape \(3,\); for k_pages of shape", k_scale=torch.ones(3))
    refused("v_scale is 0.0; a scale must be positive", v_scale=torch.tensor(0.0))
    refused("v_scale is a float; v_scale must be a torch.Tensor", v_scale=1.0)
