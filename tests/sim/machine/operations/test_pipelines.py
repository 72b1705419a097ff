"""The K/V pipelines: each struct in a small kernel, right under every schedule, and every synchronisation needed."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.builds import build
from tests.sim.knocking import knocked_out, reviewed
from tests.sim.machine.kernels import pipeline as kernels
from warpattn.sim import Report, TensorDescriptor, simulate

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(6))]
REGISTERS = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])


class RingCase:
    """A kernel with its operands: five tiles of keys, fp16; chunks 0 is the shared ring."""

    def __init__(self, chunks: int, tiles: int = 5, depth: int = 128) -> None:
        self.tiles, self.chunks = tiles, chunks
        torch.manual_seed(0)
        self.q, self.k, self.v = (torch.randn(rows, depth).half() / 2 for rows in (128, 64 * tiles, 64 * tiles))
        width = depth // max(chunks, 1)
        boxes = {"q_desc": (128, width), "k_desc": (64, width), "v_desc": (64, depth)}
        self.boxes = {name: (tensor, boxes[name]) for name, tensor in zip(boxes, (self.q, self.k, self.v), strict=True)}
        layout = {n: gl.NVMMASharedLayout.get_default_for(list(box), gl.float16) for n, box in boxes.items()}
        kernel = kernels.two_rings_kernel if chunks else kernels.shared_ring_kernel
        constants = {"chunks": chunks} if chunks else {}
        self.kernel = build(kernel, self.arguments(), constants, layout=layout, arch="sm100")

    def arguments(self) -> dict:
        descs = {name: TensorDescriptor(*box) for name, box in self.boxes.items()}
        return {**descs, "out": torch.full((128, self.v.shape[1]), float("nan")), "tiles": self.tiles}

    def run(self, kernel=None, **options) -> tuple[Report, bool]:
        args = self.arguments()
        report = simulate(kernel or self.kernel, (1,), args, **options)
        p = torch.relu(self.q.float() @ self.k.float().T * 0.125).half().float()
        return report, torch.allclose(args["out"], p @ self.v.float(), atol=2e-2)


def sum_of_tiles(kernel=None, tiles: int = 7, stages: int = 3, **options) -> tuple[Report, bool]:
    """The ring that warps read."""
    torch.manual_seed(0)
    x, out = torch.randn(64 * tiles, 64).half(), torch.full((64, 64), float("nan"))
    args = {"x_desc": TensorDescriptor(x, (64, 64)), "out": out, "steps": tiles}
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    constants = {"layout": REGISTERS, "stages": stages}
    built = build(kernels.warps_ring_kernel, args, constants, layout=layout)
    report = simulate(kernel or built, (1,), args, **options)
    return report, torch.allclose(out, x.float().reshape(tiles, 64, 64).sum(0), atol=1e-4)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_rings_of_the_tensor_core(chunks, schedule, seed):
    report, right = RingCase(chunks).run(schedule=schedule, seed=seed)
    assert report.clean, report
    assert right


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [0, 2])
def test_any_number_of_tiles(chunks, tiles):
    report, right = RingCase(chunks, tiles).run(schedule="lazy")
    assert report.clean and right, report


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_ring_that_warps_read(stages, schedule, seed):
    report, right = sum_of_tiles(stages=stages, schedule=schedule, seed=seed)
    assert report.clean, report
    assert right


def test_v_is_given_back_late():
    """The order of slots in the table of nvidia/kv_ring.py."""
    trace, phases = np.full(11, -1, np.int32), np.full(2, -1, np.int32)
    args = {"trace": trace, "phases": phases, "tiles": 3}
    report = simulate(build(kernels.slots_kernel, args, arch="sm100"), (1,), args)
    assert report.clean, report
    assert trace.tolist() == [0, 0, 1, 2, 1, 2, 3, 4, 3, 4, 5]
    assert phases.tolist() == [0, 1], "six tiles fill the ring once"


def test_barriers_are_one_array_per_ring():
    shared, chunked = (RingCase(chunks).kernel.asm["ttgir"] for chunks in (0, 2))
    assert shared.count("ttng.init_barrier") == 2 * 3 + 4
    assert chunked.count("ttng.init_barrier") == 2 * 3 * 2 + 2 * 3 + 4
    assert "memdesc<6x1xi64" in shared and "memdesc<12x1xi64" in chunked


# Operation, what stands in one of its lines of Python, why it can go.
REDUNDANT = [
    ("ttng.fence_async_shared", "fence_async_shared()", "it makes new barriers visible to TMA: not modelled"),
    ("ttng.wait_barrier", "kv.acquire_k(state, c)", "both chunks of K are given back after the same products"),
]
reason = reviewed(REDUNDANT)


@pytest.mark.parametrize("chunks", [0, 2])
def test_every_synchronisation_of_the_tensor_cores_rings_is_needed(chunks):
    case = RingCase(chunks, tiles=7)

    def once(module, schedule) -> Report:
        return case.run(module, schedule=schedule, step_limit=20_000, first_finding=True)[0]

    results = knocked_out(case.kernel, once, reason, ("lazy", "eager", "adversarial"))
    assert sum(not found.noticed for found in results) == (2 if chunks else 1), "of the chunks' waits one is needed"


def test_every_synchronisation_of_the_warps_ring_is_needed():
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    args = {"x_desc": TensorDescriptor(torch.zeros(64, 64).half(), (64, 64)), "out": torch.zeros(64, 64), "steps": 7}
    kernel = build(kernels.warps_ring_kernel, args, {"layout": REGISTERS, "stages": 2}, layout=layout)

    def once(module, schedule) -> Report:
        return sum_of_tiles(module, schedule=schedule, step_limit=20_000, first_finding=True)[0]

    knocked_out(kernel, once, reason, ["lazy"])
