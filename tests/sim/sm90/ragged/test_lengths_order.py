"""The list of query blocks that order_kernel makes from lengths on the device, and the maps of clipped rows."""

import pytest
import torch

pytest.importorskip("triton")

from tests.cases import Case
from tests.oracle import Inputs
from tests.sim.sm90.lengths import kernel, ready_for
from warpattn.errors import AttentionError
from warpattn.kernels.nvidia.clipped_map import EXTENT, ROWS, clipped_map
from warpattn.kernels.sm90.prefill_varlen.config import VarlenConfig, choose
from warpattn.kernels.sm90.prefill_varlen.launch import list_launches
from warpattn.problem import CheckedCall
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands
from warpattn.sim import simulate

BLOCK = 128
BASE = Case(dim=64, dtype=torch.bfloat16, heads_q=1, heads_kv=1)


def order_of(ready: CheckedCall, x: Inputs) -> Launch:
    """The launch that lists the query blocks."""
    operands = Operands(x.q, x.k, x.v, torch.empty_like(x.q), None, None)
    return list_launches(ready, operands, x.sequence, choose(ready.problem, ARCHS["sm90"]))[0]


def records(case: Case) -> tuple[list[tuple[int, ...]], int]:
    """(b, row, q_start, len_q, k_start, len_k) of every record in order, and the tile counter."""
    x = case.build()
    step = order_of(ready_for(x), x)
    step.args["list_ptr"].fill_(-99)
    report = simulate(kernel(step), step.grid, step.args)
    assert report.clean, report
    head, *rows = step.args["list_ptr"].view(-1, 8).tolist()
    assert all(row == [-99] * 8 for row in rows[head[0] :]), "nothing is written past the list"
    return [tuple(row[:6]) for row in rows[: head[0]]], head[1]


@pytest.mark.parametrize("batch", [1, 5, 300])
def test_every_block_once_and_the_longest_first(batch):
    lens = torch.randint(0, 400, (batch,)).tolist()
    lens[batch // 2] = 390
    found, counter = records(Case(**vars(BASE) | {
        "kind": "ragged", "batch": batch, "lens_q": tuple(lens), "mask": "causal",
    }))  # fmt: skip
    starts = torch.tensor([0, *lens]).cumsum(0).tolist()
    expected = {(b, row, starts[b], n, starts[b], n) for b, n in enumerate(lens) for row in range(0, n, BLOCK)}
    assert counter == 0
    assert len(found) == len(expected) and set(found) == expected
    keys = [min(row + BLOCK, length) for _, row, _, length, _, _ in found]
    tiles = [-(-k // BLOCK) for k in keys]
    assert tiles == sorted(tiles, reverse=True) and (batch == 1 or tiles[0] > tiles[-1])


def test_pages_bound_the_lengths():
    """Lengths that no table could hold, and negative ones, are cut: nothing is read out of bounds."""
    x = Case(**vars(BASE) | {"kind": "paged", "batch": 3, "seq_q": 70, "lens_k": (40, 7, 9), "page_size": 16}).build()
    ready = ready_for(x)
    x.sequence.lengths.copy_(torch.tensor([10**6, -5, 9], dtype=torch.int32))
    step = order_of(ready, x)
    assert simulate(kernel(step), step.grid, step.args).clean
    head, *rows = step.args["list_ptr"].view(-1, 8).tolist()
    assert head[0] == 3
    capacity = 16 * x.sequence.block_table.shape[1]
    assert {(row[0], row[5]) for row in rows} == {(0, capacity), (1, 0), (2, 9)}


def address(strides: tuple[int, ...], coordinate: tuple[int, ...]) -> int:
    """Byte address of a coordinate, as 64 bits hold it."""
    return 2 * sum(c * s for c, s in zip(coordinate, strides, strict=True)) % 2**64


@pytest.mark.parametrize("layout", ["rows", "pages", "heads-first", "odd", "one-page", "one-row"])
def test_clipped_maps_reach_every_row(layout):
    shape = {"rows": (50, 4, 64), "one-page": (1, 16, 4, 64), "one-row": (7, 1, 4, 64)}.get(layout, (7, 16, 4, 64))
    x = torch.zeros(shape, dtype=torch.bfloat16)
    if layout == "heads-first":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "odd":
        x = torch.zeros(7, 16 * 256 + 8, dtype=torch.bfloat16)[:, :-8].unflatten(1, (16, 4, 64))
    found, step, unit = clipped_map("k", x, 8, 64)
    assert all(2 * s % 16 == 0 and 0 < 2 * s < 2**40 for s in found.strides[:-1])
    assert found.shape[2] == ROWS and max(found.shape[:2]) == EXTENT
    starts = range(3) if x.ndim == 4 and len(x) > 1 else (0, 11) if x.ndim == 3 else (0,)
    length = min(5, x.shape[-3])
    for start in starts:
        for row in range(length):
            coordinate = (2**30, start * step + length * unit, ROWS - length + row, 3, 8)
            item = x[start, row] if x.ndim == 4 else x[start + row]
            assert address(found.strides, coordinate) == item[3, 8:].data_ptr() - x.data_ptr()


def test_rows_too_far_apart_to_count():
    """8 elements are the common divisor of the strides, and the last page lies 2**33 of them away."""
    x = torch.empty_strided((2**20, 16, 1, 64), (2**16 + 8, 64, 64, 1), dtype=torch.bfloat16, device="meta")
    with pytest.raises(AttentionError, match=r"kv.k_pages has shape .* steps of 8 elements"):
        clipped_map("kv.k_pages", x, 16, 64)


BOXES = [(0, 128), (1, 0), (3, 0), (12, 0), (8, 8), (48, 16), (64, 64), (512, 128)]


@pytest.mark.parametrize(("page_size", "box"), BOXES)
def test_boxes_divide_pages_and_key_tiles(page_size, box):
    kind = {"kind": "paged", "batch": 2, "seq_q": 4, "lens_k": (3, 5), "page_size": page_size}
    case = Case(**vars(BASE) | (kind if page_size else {"kind": "ragged", "lens_q": (3, 5)}))
    choice = choose(ready_for(case.build()).problem, ARCHS["sm90"])
    assert isinstance(choice.config, VarlenConfig)
    assert choice.config.box == box and choice.config.page_size == page_size
    assert choice.config.tiles.smem_bytes <= ARCHS["sm90"].smem
