"""Pointers into several tensors: chosen by lanes, loaded from tables, made of integers; and what is no pointer."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.sim.builds import build, poison, run
from tests.sim.machine.kernels import pointer as kernels
from warpattn.sim import PointerTable, SimulationError, simulate

AT = np.arange(64)
ODD = AT % 2 == 1


def chosen(op: str, **options):
    x, y = np.arange(64, dtype=np.float32), -np.arange(64, dtype=np.float32)
    out = {"out_x": np.zeros(64, np.float32), "out_y": np.zeros(64, np.float32)}
    report = run(kernels.choose_kernel, (1,), {"x": x, "y": y, **out, "n": 50}, {"OP": op}, **options)
    return report, out["out_x"], out["out_y"]


@pytest.mark.parametrize("arch", ["sm90", "gfx950"])
@pytest.mark.parametrize("op", ["store", "masked", "add"])
def test_lanes_of_one_access_may_reach_several_tensors(op, arch):
    report, out_x, out_y = chosen(op, arch=arch)
    assert report.clean, report
    value = np.where(ODD, AT, -AT)
    if op == "masked":
        value = np.where(AT < 3, 0, np.where(AT < 50, value, 7))
    np.testing.assert_array_equal(out_x, np.where(ODD, value, 0))
    np.testing.assert_array_equal(out_y, np.where(ODD, 0, value))


def test_what_leaves_one_of_them_is_found():
    (finding,) = chosen("outside")[0].findings
    assert finding.kind == "OutOfBounds" and finding.buffer == "x" and finding.box == (4 * (64 + 1), 4 * (49 + 64 + 1))


def groups() -> tuple[list[torch.Tensor], dict]:
    tensors = [torch.randn(n) for n in (100, 3, 128)]
    sizes, out = np.array([100, 3, 128], np.int32), poison(3)
    return tensors, {"tables": PointerTable(tensors), "sizes": sizes, "out": out}


def test_a_table_of_pointers():
    tensors, args = groups()
    report = run(kernels.grouped_kernel, (3,), args)
    assert report.clean, report
    np.testing.assert_allclose(args["out"], [tensor.sum() for tensor in tensors], atol=1e-4)


def test_a_table_that_the_caller_made():
    tensors, args = groups()
    addresses = torch.tensor([tensors[0][40:].data_ptr(), tensors[2].data_ptr(), tensors[1].data_ptr()])
    args |= {"tables": PointerTable(tensors, addresses), "sizes": np.array([60, 128, 3], np.int32)}
    report = run(kernels.grouped_kernel, (3,), args)
    assert report.clean, report
    np.testing.assert_allclose(args["out"], [tensors[0][40:].sum(), tensors[2].sum(), tensors[1].sum()], atol=1e-4)


def test_a_size_beyond_a_tables_tensor_and_an_unknown_address_are_found():
    _, args = groups()
    args["sizes"][1] = 4
    (finding,) = run(kernels.grouped_kernel, (3,), args).findings
    assert finding.kind == "OutOfBounds" and finding.buffer == "tables[1]"
    tensors, args = groups()
    args["tables"] = PointerTable(tensors, torch.tensor([tensors[0].data_ptr(), 1 << 60, tensors[2].data_ptr()]))
    (finding,) = run(kernels.grouped_kernel, (3,), args).findings
    assert finding.kind == "OutOfBounds" and "0x1000000000000000, which belongs to no argument" in str(finding)


def test_integers_are_the_callers_addresses():
    x, out, address = torch.randn(64), torch.zeros(64), torch.zeros(1, dtype=torch.int64)
    assert x.data_ptr() % 64 == 0
    report = run(kernels.integer_kernel, (1,), {"x": x, "out": out})
    assert report.clean and torch.equal(x, out), report
    assert run(kernels.address_kernel, (1,), {"x": x, "out": address}).clean
    assert address.item() == x.data_ptr()


@pytest.mark.parametrize("value", [0, 5, np.int64(7), True])
def test_an_integer_is_no_pointer(value):
    x, out = np.zeros(64, np.float32), np.zeros(64, np.float32)
    kernel = build(kernels.integer_kernel, {"x": x, "out": out})
    with pytest.raises(SimulationError, match=f"x is {value}; for a pointer the simulator takes a tensor, or None"):
        simulate(kernel, (1,), {"x": value, "out": out})
