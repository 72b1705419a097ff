"""Right kernels that look wrong at first sight have no findings; the same with a real fault have one."""

import linecache

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.builds import poison, run
from tests.sim.machine.kernels import alarm as kernels
from tests.sim.machine.kernels import gluon as gluon_kernels
from warpattn.sim import Report, TensorDescriptor

N = 64
SCHEDULES = ["eager", "lazy", "random", "adversarial"]
FULL = np.repeat(np.arange(N) < 48, N).reshape(N, N)


def simulated(kernel, mode: str, n: int, rows: int = N, **options) -> tuple[Report, np.ndarray]:
    out = poison((rows, N))
    return run(kernel, (1,), {"out": out, "n": n}, {"MODE": mode}, **options), out


def line(finding, place: int = 0) -> str:
    return linecache.getline(*finding.places[place].frames[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_index_that_is_never_accessed(schedule):
    report, out = simulated(kernels.index_kernel, "right", 4, schedule=schedule)
    assert report.clean and (out == 3).all(), report


@pytest.mark.parametrize(
    ("mode", "access", "what"), [("waits", "mbarrier.wait", "bars"), ("loads", "view.load", "tiles")]
)
def test_an_index_outside_is_reported_at_the_access(mode, access, what):
    (finding,) = simulated(kernels.index_kernel, mode, 4)[0].of_kind("OutOfBounds")
    assert access in line(finding) and finding.buffer == what
    assert f"reaches tile -1 of {what}, which has 4" in str(finding)


@pytest.mark.parametrize("mode", ["selected", "masked", "reduced", "moved"])
def test_unwritten_rows_that_go_nowhere(mode):
    report, out = simulated(kernels.unwritten_kernel, mode, 48)
    assert report.clean, report
    if mode == "reduced":
        assert (out.reshape(-1)[:48] == 2 * N).all() and np.isnan(out.reshape(-1)[48:]).all()
    else:
        assert (out[FULL] == 2).all()
        assert (out[~FULL] == 3).all() if mode == "selected" else np.isnan(out[~FULL]).all()


@pytest.mark.parametrize(
    ("mode", "use"),
    [("selected", "gl.store"), ("masked", "gl.store"), ("reduced", "gl.store"), ("branch", "if total > 0")],
)
def test_unwritten_rows_that_are_used(mode, use):
    """Reported once, with the load and the line that uses its value."""
    (finding,) = simulated(kernels.unwritten_kernel, mode, 49)[0].findings
    assert finding.kind == "UninitialisedRead" and finding.buffer == "tile"
    assert "tile.load" in line(finding) and use in line(finding, 1)


def test_unwritten_rows_that_are_stored_and_loaded_again():
    (finding,) = simulated(kernels.unwritten_kernel, "moved", 49)[0].findings
    assert finding.kind == "UninitialisedRead" and "gl.store" in line(finding, 1)


@pytest.mark.parametrize(("rows", "kinds"), [(48, []), (40, []), (49, ["UninitialisedRead"])])
def test_a_tma_store_that_drops_the_unwritten_rows(rows, kinds):
    layout = gl.NVMMASharedLayout.get_default_for([N, N], gl.float32)
    out = torch.zeros(rows, N)
    args = {"out_desc": TensorDescriptor(out, (N, N)), "n": 0}
    report = run(kernels.clipped_kernel, (1,), args, {"MODE": ""}, layout=layout)
    assert [finding.kind for finding in report.findings] == kinds
    assert (out[:48] == 1).all()


def test_tensor_memory_that_is_replaced():
    report, out = simulated(kernels.tensor_memory_kernel, "replaced", 0, 128, arch="sm100")
    assert report.clean and (out == 1).all(), report
    (finding,) = simulated(kernels.tensor_memory_kernel, "kept", 0, 128, arch="sm100")[0].findings
    assert finding.kind == "UninitialisedRead" and "gl.store" in line(finding, 1)


def test_a_missing_fence_within_a_role_is_a_note():
    """Triton 3.9 inserts it: the machine code has one without the author's."""
    layout = gl.NVMMASharedLayout.get_default_for([N, N], gl.float16)
    x, out = torch.randn(N, N).half(), torch.zeros(N, N).half()
    args = {"x_desc": TensorDescriptor(x, (N, N)), "out_desc": TensorDescriptor(out, (N, N))}
    report = run(gluon_kernels.copy_kernel, (1,), args, {"FAULT": "no_fence"}, layout=layout)
    assert report.clean and torch.equal(out, 2 * x)
    (note,) = report.notes
    assert note.kind == "MissingFence" and "tma.async_store(out_desc" in line(note)
    assert "note: MissingFence" in str(report)


UNWRITTEN = ["UninitialisedRead"]


@pytest.mark.parametrize(("write", "kinds"), [("first", []), ("nothing", UNWRITTEN), ("next", UNWRITTEN)])
def test_a_word_of_a_tile_is_no_more_written_than_it_is(write, kinds):
    out = np.zeros(64, np.int32)
    report = run(gluon_kernels.word_kernel, (1,), {"out": out}, {"WRITE": write}, num_warps=1)
    assert [finding.kind for finding in report.findings] == kinds, report


def test_the_only_element_of_a_tensor_is_a_number():
    x, out = np.array([5 << 32 | 7]), np.zeros(2, np.int32)
    assert run(gluon_kernels.only_element_kernel, (1,), {"x": x, "out": out}, {}, num_warps=1).clean
    assert out.tolist() == [5, 7]
