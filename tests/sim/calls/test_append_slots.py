"""append_slots: torch against a loop in plain Python, the kernel in the simulator against torch, and bad input."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.sim.calls.test_append import same, tables
from warpattn.errors import AttentionError
from warpattn.kernels.cache.launch import NewRows, slot_launches
from warpattn.problem.arch import ARCHS
from warpattn.runtime.simulate import Options, run_launch
from warpattn.serving import append_slots

SLOTS = (5, -1, 0, 15, 38, -1, 8)
POSITIONS = (3, 99, 0, 15, 2, -7, 4)


def cache(dim: int, dim_v: int, dtype: torch.dtype, heads: int, order: str):
    """Views (k_pages, v_pages) of 10 pages of 4 full of NaN: of one tensor, heads before rows, as vLLM has them; or of
    one tensor, keys' pages first; or two tensors."""
    if order == "interleaved":
        whole = torch.full((10, heads, 4, dim + dim_v), float("nan"), dtype=dtype)
        return whole.transpose(1, 2).split((dim, dim_v), -1)
    if order == "stacked":
        return torch.full((2, 10, 4, heads, dim), float("nan"), dtype=dtype).unbind()
    return [torch.full((10, 4, heads, d), float("nan"), dtype=dtype) for d in (dim, dim_v)]


def new_rows(dim: int, dim_v: int, dtype: torch.dtype, heads: int, more: int = 2):
    """k, v with rows of padding after those that have slots."""
    torch.manual_seed(0)
    return [torch.randn(len(SLOTS) + more, heads, d).to(dtype) for d in (dim, dim_v)]


def by_hand(pages, rows, angles=None, interleaved: bool = False):
    """The expected pages, token by token."""
    expected = [x.clone() for x in pages]
    for t, slot in enumerate(SLOTS):
        if slot < 0:
            continue
        for target, x, turned in zip(expected, rows, (angles is not None, False), strict=True):
            row = x[t].float().clone()
            if turned:
                half, before = angles[0].shape[1], row.clone()
                for i in range(half):
                    c, s = (float(y[POSITIONS[t], i]) for y in angles)
                    first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
                    row[:, first] = before[:, first] * c - before[:, second] * s
                    row[:, second] = before[:, second] * c + before[:, first] * s
            target[slot // 4, slot % 4] = row.to(target.dtype)
    return expected


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("order", ["interleaved", "stacked", "apart"])
def test_torch(order, index):
    pages, rows = cache(16, 16, torch.float32, 3, order), new_rows(16, 16, torch.float32, 3)
    expected = by_hand(pages, rows)
    assert append_slots(*rows, *pages, torch.tensor(SLOTS, dtype=index)) is None
    assert all(same(x, y, True) for x, y in zip(pages, expected, strict=True))
    assert int((~pages[0].isnan()).sum()) == 5 * 3 * 16


@pytest.mark.parametrize("interleaved", [False, True])
def test_torch_rotates(interleaved):
    pages, rows, angles = cache(16, 8, torch.float32, 3, "apart"), new_rows(16, 8, torch.float32, 3), tables(6)
    expected = by_hand(pages, rows, angles, interleaved)
    named = {"cos": angles[0], "sin": angles[1], "positions": torch.tensor(POSITIONS), "interleaved": interleaved}
    append_slots(*rows, *pages, torch.tensor(SLOTS), **named)
    assert same(pages[0], expected[0], False) and same(pages[1], expected[1], True)


CASES = [(torch.float32, 16, 16, 0, False, "stacked"), (torch.bfloat16, 128, 128, 0, False, "interleaved"),
         (torch.bfloat16, 64, 40, 24, False, "interleaved"), (torch.float16, 20, 6, 10, True, "apart")]  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dtype", "dim", "dim_v", "columns", "interleaved", "order"), CASES)
def test_kernel(dtype, dim, dim_v, columns, interleaved, order, arch):
    pages, rows = cache(dim, dim_v, dtype, 9, order), new_rows(dim, dim_v, dtype, 9)
    angles = tables(columns) if columns else None
    expected = by_hand(pages, rows, angles, interleaved)
    index = torch.int32 if order == "apart" else torch.int64
    slots = torch.tensor(SLOTS, dtype=index)
    positions = None if angles is None else torch.tensor(POSITIONS, dtype=index)
    (step,) = slot_launches(arch, tuple(pages), slots, positions, NewRows(*rows, angles, interleaved))
    report = run_launch(step, Options("adversarial"))
    assert report.clean, report
    assert same(pages[0], expected[0], columns == 0) and same(pages[1], expected[1], True)


@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_of_one_tensor(arch):
    """A latent cache: 576 columns of one head, no values."""
    pages, rows = cache(576, 8, torch.bfloat16, 1, "apart"), new_rows(576, 8, torch.bfloat16, 1)
    expected = by_hand(pages, rows)
    (step,) = slot_launches(arch, (pages[0], None), torch.tensor(SLOTS), None, NewRows(rows[0], None, None, False))
    report = run_launch(step, Options("adversarial"))
    assert report.clean, report
    assert same(pages[0], expected[0], True) and pages[1].isnan().all()


@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_writes_nothing_to_slots_that_are_not_there(arch):
    pages, rows = cache(16, 16, torch.bfloat16, 3, "stacked"), new_rows(16, 16, torch.bfloat16, 3)
    slots = torch.tensor([-1, -5, 40, 41, 2**31, 2**33 + 1, -(2**40)])
    (step,) = slot_launches(arch, tuple(pages), slots, None, NewRows(*rows, None, False))
    report = run_launch(step, Options("adversarial"))
    assert report.clean, report
    assert pages[0].isnan().all() and pages[1].isnan().all()


BAD = {
    "k is a list": {"k": []},
    "k has shape": {"k": torch.zeros(9, 32)},
    "k has 6 tokens": {"k": torch.zeros(6, 2, 16)},
    "v is None": {"v": None},
    "v_pages is None": {"v_pages": None},
    "v has 3 heads": {"v": torch.zeros(9, 3, 16)},
    "k_pages has head_dim 8": {"k_pages": torch.zeros(10, 4, 2, 8)},
    "v_pages has 9 pages": {"v_pages": torch.zeros(9, 4, 2, 16)},
    "v has dtype": {"v": torch.zeros(9, 2, 16).half()},
    "slot_mapping has dtype": {"slot_mapping": torch.zeros(7)},
    "slot_mapping has shape": {"slot_mapping": torch.zeros(7, 1).int()},
    "slot_mapping[1] is -2": {"slot_mapping": torch.tensor([0, -2])},
    "slot_mapping[0] is 40": {"slot_mapping": torch.tensor([40, 0])},
    "positions is None": {"positions": None},
    "positions has 6 elements": {"positions": torch.zeros(6).int()},
    "positions has dtype": {"positions": torch.zeros(9)},
    "positions[3] is 16": {"positions": torch.tensor([0, 1, 2, 16, 4, 5, 6])},
    "positions is given": {"cos": None, "sin": None},
    "sin is None": {"sin": None},
    "k_pages has strides": {"k_pages": torch.zeros(10, 4, 16, 2).transpose(2, 3)},
    "interleaved is 'yes'": {"interleaved": "yes"},
    "v requires a gradient": {"v": torch.zeros(9, 2, 16, requires_grad=True)},
    "k_pages has shape": {"k_pages": torch.zeros(10, 0, 2, 16), "v_pages": torch.zeros(10, 0, 2, 16)},
}


@pytest.mark.parametrize("start", BAD)
def test_bad_input(start):
    nan = float("nan")
    good = {
        "k": torch.zeros(9, 2, 16), "v": torch.zeros(9, 2, 16),
        "k_pages": torch.full((10, 4, 2, 16), nan), "v_pages": torch.full((10, 4, 2, 16), nan),
        "slot_mapping": torch.tensor(SLOTS), "positions": torch.zeros(7).long(),
        "cos": tables(4)[0], "sin": tables(4)[1],
    }  # fmt: skip
    with pytest.raises(AttentionError) as raised:
        append_slots(**good | BAD[start])
    assert any(reason.startswith(start) for reason in raised.value.reasons), raised.value
    assert good["k_pages"].isnan().all(), "nothing is written before the rules hold"


def test_tensors_without_values_are_refused():
    x = torch.zeros(4, 4, 2, 16, device="meta")
    with pytest.raises(AttentionError, match="k_pages is on the device meta"):
        append_slots(x[0], x[1], x, x.clone(), torch.zeros(4, device="meta", dtype=torch.int64))
