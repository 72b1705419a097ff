"""Machine code of the append and the quantising kernels on Hopper: how wide rows are copied."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from warpattn.kernels.cache.launch import NewRows, append_launches, slot_launches
from warpattn.kernels.quantise.launch import quantise_launches
from warpattn.problem.launch import Launch
from warpattn.runtime import compiler
from warpattn.sequences import PagedKV
from warpattn.serving.quantizing import arguments


def of_slots(shift: int) -> Launch:
    """Keys and values interleaved in one cache; new rows begin `shift` elements after a multiple of 16 bytes."""
    k_pages, v_pages = torch.zeros(4, 8, 16, 256).bfloat16().transpose(1, 2).split(128, -1)
    k, v = (torch.zeros(9 * 8 * 128 + shift).bfloat16()[shift:].view(9, 8, 128) for _ in range(2))
    (launch,) = slot_launches("sm90", (k_pages, v_pages), torch.zeros(9).long(), None, NewRows(k, v, None, False))
    return launch


def of_table(shift: int) -> Launch:
    k_pages, v_pages = (torch.zeros(4, 16, 8, 128).bfloat16() for _ in range(2))
    k, v = (torch.zeros(2 * 8 * 128 + shift).bfloat16()[shift:].view(2, 1, 8, 128) for _ in range(2))
    kv = PagedKV(k_pages, v_pages, torch.zeros(2, 2).int(), torch.zeros(2).int())
    (launch,) = append_launches("sm90", kv, NewRows(k, v, None, False))
    return launch


def ptx_of(launch: Launch) -> str:
    return compiler.compiled(launch).asm["ptx"]


@pytest.mark.parametrize("made", [of_slots, of_table])
def test_rows_are_copied_16_bytes_at_a_time(made):
    ptx = ptx_of(made(0))
    assert ptx.count("ld.global.v4.b32") >= 8, "K and V, four of each"
    assert ptx.count("st.global.v4.b32") == 8 and "st.global.b16" not in ptx
    assert ".local" not in ptx, "no stack"


@pytest.mark.parametrize("made", [of_slots, of_table])
def test_rows_in_between_are_copied_element_by_element(made):
    ptx = ptx_of(made(1))
    assert "st.global.v4" not in ptx and "st.global.b16" in ptx


@pytest.mark.parametrize("per", ["head", "token"])
def test_rows_of_8_bits_are_made_16_bytes_at_a_time(per):
    """A thread has 32 elements of two rows: four loads of eight, a conversion for two elements, and divisions for rows
    alone."""
    _, call = arguments(torch.zeros(2, 64, 4, 128).bfloat16(), torch.float8_e4m3fn, per, None)
    ptx = [ptx_of(launch) for launch in quantise_launches("sm90", call)]
    assert all(each.count("ld.global.v4.b32") == 4 and ".local" not in each for each in ptx)
    values = ptx[-1]
    assert values.count("cvt.rn.satfinite.e4m3x2.f32") == 16 and values.count("st.global.v4.b32") == 2
    assert "div.full" not in values and values.count("div.rn.f32") <= 4, "two a row: its scale and the inverse"
