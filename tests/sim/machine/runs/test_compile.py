"""compile_for compiles what a launch compiles, or what its types say; arguments that do not fit are refused."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.sim.machine.kernels.matmul import matmul_kernel
from tests.sim.machine.kernels.plain import binary_kernel
from warpattn.sim import SimulationError, compile_for, knock_out, simulate

TYPES = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "N": "constexpr", "OP": "constexpr"}


def matmul(n: int) -> dict:
    a, b, c = torch.randn(n, n).half(), torch.randn(n, n).half(), torch.full((n, n), float("nan"))
    return {"a": a, "b": b, "c": c, "n": n, "stride_a": n, "stride_b": n, "inner": 1, "B": 64}


def copies(kernel) -> int:
    return kernel.asm["ttgir"].count("ttg.async_copy_global_to_local")


def right(kernel, args: dict) -> bool:
    tiles = -(-args["n"] // 64)
    report = simulate(kernel, (tiles, tiles), {name: value for name, value in args.items() if name != "B"})
    assert report.clean, report
    return torch.allclose(args["c"], args["a"].float() @ args["b"].float(), atol=1e-2)


def test_values_are_specialised_as_a_launch_does_it():
    """Strides that 16 divides and those of 1 make the loads wide enough for cp.async, in as many stages as asked."""
    args = matmul(192)
    kernel = compile_for("sm90", matmul_kernel, args)
    assert copies(kernel) == 6, "two tensors, in a prologue of two stages and the loop"
    assert kernel.folded == {"inner": 1}
    assert right(kernel, args)
    assert copies(compile_for("sm90", matmul_kernel, args, num_stages=2)) == 4
    assert copies(compile_for("sm90", matmul_kernel, args, num_stages=1)) == 0


def test_types_can_say_the_same_and_otherwise():
    args = matmul(192)
    known = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "n": "i32:16", "stride_a": "i32:16", "stride_b": "i32:16"}
    known |= {"inner": "i32:1", "B": 64}
    same = compile_for("sm90", matmul_kernel, known)
    assert same.asm["ttgir"] == compile_for("sm90", matmul_kernel, args).asm["ttgir"]
    anything = known | dict.fromkeys(["n", "stride_a", "stride_b", "inner"], "i32") | {"a": "*fp16:2", "b": "*fp16:2"}
    general = compile_for("sm90", matmul_kernel, anything)
    assert copies(general) == 0 and not general.folded
    odd = matmul(75)
    assert right(general, odd)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 75}, "n has value 75, and the kernel was compiled for multiples of 16"),
        ({"inner": 2}, "inner is 2, and the kernel was compiled for 1"),
        ({"c": torch.zeros(192 * 192 + 1)[1:].view(192, 192)}, r"c has address \d+, and the kernel was compiled for"),
    ],
)
def test_arguments_that_the_kernel_was_not_compiled_for(change, message):
    args = matmul(192)
    kernel = compile_for("sm90", matmul_kernel, args)
    del args["B"]
    with pytest.raises(SimulationError, match=message):
        simulate(kernel, (3, 3), args | change)


@pytest.mark.parametrize(
    ("types", "constants", "message"),
    [
        (TYPES | {"z": "i32"}, {}, "the kernel has no parameter 'z'; it has x, y, out, n, N, OP"),
        (TYPES, {"N": 64}, "OP is constexpr; its value is missing"),
        ({"x": "*fp32"}, {"N": 64, "OP": "add"}, "y is missing in the signature"),
        (TYPES | {"n": "i32:many"}, {"N": 64, "OP": "add"}, "the type 'i32:many' has no number after its colon"),
        (TYPES | {"x": object()}, {"N": 64, "OP": "add"}, "x is an object; give its type instead"),
    ],
)
def test_signatures_that_do_not_fit(types, constants, message):
    with pytest.raises(SimulationError, match=message):
        compile_for("sm90", binary_kernel, types, constants)


@pytest.mark.parametrize("arch", ["sm90", "gfx950"])
def test_numpy_arrays_and_numbers_are_examples_too(arch):
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    args = {"x": x, "y": x, "out": out, "n": np.int64(48)}
    kernel = compile_for(arch, binary_kernel, args, {"N": 64, "OP": "add"})
    assert simulate(kernel, (1,), args).clean
    np.testing.assert_array_equal(out[:48], 2 * x[:48])


def test_a_kernel_that_is_taken_apart_keeps_the_integers_that_are_one() -> None:
    args = {"x": np.ones(64, np.float32), "y": np.ones(64, np.float32), "out": np.zeros(64, np.float32), "n": 1}
    compiled = compile_for("sm90", binary_kernel, args, {"N": 64, "OP": "add"})
    assert compiled.folded == {"n": 1}
    assert knock_out(compiled, lambda module: simulate(module, (1,), args)) == [] and args["out"].sum() == 2
