"""TMA reductions and semaphores: their values, what they wait for, and what orders programs that share an address."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from tests.sim.builds import poison, run
from tests.sim.machine.kernels import reduce as kernels
from warpattn.sim import Report, TensorDescriptor

N, PROGRAMS, ROWS = 64, 3, 80
SCHEDULES = ["eager", "lazy", "random", "adversarial"]
FLOATS, INTEGERS = ["float32", "float16", "bfloat16"], ["int32", "uint32"]
FUNCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
LEGAL = [
    *(("add", dtype) for dtype in (*FLOATS, *INTEGERS)),
    *((kind, dtype) for kind in ("min", "max") for dtype in ("float16", "bfloat16", *INTEGERS)),
    *((kind, dtype) for kind in ("and", "or", "xor") for dtype in INTEGERS),
]


def layout(dtype: str) -> gl.NVMMASharedLayout:
    names = {"float32": gl.float32, "float16": gl.float16, "bfloat16": gl.bfloat16}
    return gl.NVMMASharedLayout.get_default_for([N, N], names.get(dtype, gl.int32))


def tensors(dtype: str) -> tuple:
    """x [programs, N, N] and out [rows, N] of small integers; unsigned ones have the highest bit, too."""
    rng = np.random.default_rng(0)
    x, out = rng.integers(-50, 50, (PROGRAMS, N, N)), rng.integers(-50, 50, (ROWS, N))
    if dtype in FLOATS:
        return tuple(torch.tensor(each).to(getattr(torch, dtype)) for each in (x, out))
    return x.astype(dtype), out.astype(dtype)


def values(tensor: torch.Tensor | np.ndarray) -> np.ndarray:
    """A copy, as float32 if the dtype is NumPy's no more."""
    return tensor.float().clone().numpy() if isinstance(tensor, torch.Tensor) else tensor.copy()


def reduced(
    kind: str = "add", dtype: str = "float32", fault: str = "", programs: int = PROGRAMS, **options
) -> tuple[Report, tuple, tuple]:
    """The report; x and out before; x and out after."""
    x, out = tensors(dtype)
    before = values(x), values(out)
    args = {"x": x, "out_desc": TensorDescriptor(out, (N, N)), "out": out}
    constants = {"KIND": kind, "FAULT": fault}
    report = run(kernels.reduce_kernel, (programs,), args, constants, layout=layout(dtype), **options)
    return report, before, (values(x), values(out))


@pytest.mark.parametrize(("kind", "dtype"), LEGAL)
def test_programs_reduce_into_the_same_elements(kind, dtype):
    report, (x, out), (_, found) = reduced(kind, dtype, schedule="random")
    for tile in x:
        out[32:] = FUNCTIONS[kind](out[32:], tile[: ROWS - 32])
    assert report.clean, report
    np.testing.assert_array_equal(found, out)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("no_wait", "PendingAtExit"), ("overwrite", "Race"), ("store_beside", "Race"), ("load_beside", "Race"),
        ("whole_wait", None), ("", None),
    ],
)  # fmt: skip
def test_an_access_beside_a_reduction_is_a_race(fault, kind, schedule):
    report, _, _ = reduced(fault=fault, schedule=schedule)
    assert {finding.kind for finding in report.findings} == ({kind} if kind else set()), report


def test_a_reduction_needs_the_fence_that_a_store_needs():
    assert [note.kind for note in reduced(fault="no_fence")[0].notes] == ["MissingFence"]
    assert not reduced()[0].notes


def test_a_reduction_costs_what_a_store_costs():
    reduction, store = (reduced(kind, programs=1, timing=True)[0].timing for kind in ("add", "store"))
    assert reduction is not None and store is not None
    assert reduction.cycles == store.cycles and reduction.busy("TMA") == store.busy("TMA") > 0


def turns(poll: bool, acquire: str, release: str, schedule: str) -> tuple[Report, bool]:
    x = np.random.default_rng(0).standard_normal((PROGRAMS, N, N)).astype(np.float32)
    out, semaphore = np.zeros((N, N), np.float32), np.zeros(1, np.int32)
    constants = {"POLL": poll, "ACQUIRE": acquire, "RELEASE": release}
    args = {"x": x, "out": out, "semaphore": semaphore}
    report = run(kernels.turns_kernel, (PROGRAMS,), args, constants, schedule=schedule)
    return report, np.array_equal(out, (x[0] + x[1]) + x[2])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("poll", [False, True])
def test_a_semaphore_orders_the_programs_that_take_turns(poll, schedule):
    report, right = turns(poll, "acquire", "release", schedule)
    assert report.clean and right, report
    for acquire, release in (("relaxed", "release"), ("acquire", "relaxed")):
        report, _ = turns(poll, acquire, release, schedule)
        assert {finding.kind for finding in report.findings} == {"Race"}, report


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("whole", [True, False])
def test_a_semaphore_orders_reductions_that_were_waited_for(whole, schedule):
    """Reading shared memory is not writing the tensor: only the wait for the whole reduction may be followed."""
    x = np.random.default_rng(0).standard_normal((PROGRAMS, N, N)).astype(np.float32)
    out, expected = np.zeros((N, N), np.float32), (x[0] + x[1]) + x[2]
    args = {"x": x, "out_desc": TensorDescriptor(out, (N, N)), "semaphore": np.zeros(1, np.int32)}
    report = run(
        kernels.reduced_turns_kernel, (PROGRAMS + 1,), args, {"WHOLE": whole},
        layout=layout("float32"), schedule=schedule,
    )  # fmt: skip
    assert [finding.kind for finding in report.findings] == ([] if whole else ["Race"]), report
    if whole:
        np.testing.assert_array_equal(x[0], expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_reader_must_wait_for_all_that_updated_not_for_the_last(schedule):
    args = {"out": np.zeros((N, N), np.float32), "copy": poison((N, N)), "semaphore": np.zeros(1, np.int32)}
    report = run(kernels.last_reader_kernel, (3,), args, schedule=schedule)
    assert [finding.kind for finding in report.findings] == ["Race"], report


def test_a_poll_that_nobody_fulfils_is_a_deadlock() -> None:
    args = {"out": np.zeros((N, N), np.float32), "copy": poison((N, N)), "semaphore": np.full(1, -5, np.int32)}
    (found,) = run(kernels.last_reader_kernel, (3,), args).findings
    assert found.kind == "Deadlock" and "waits for 1 at byte 0 of semaphore, which holds -4" in found.message


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_where_a_copy_goes_is_read_when_it_is_issued(schedule):
    args = {"out_desc": TensorDescriptor(np.zeros((ROWS, N), np.float32), (N, N))}
    report = run(kernels.unwritten_row_kernel, (1,), args, {}, layout=layout("float32"), schedule=schedule)
    assert [finding.kind for finding in report.findings] == ["UninitialisedRead"], report
