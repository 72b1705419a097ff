"""What cannot be simulated is one clear error, never a wrong number."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.sim.builds import run
from tests.sim.machine.kernels import plain as kernels
from warpattn.sim import SimulationError, TensorDescriptor, compile_for, simulate

SIGNATURE = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "N": "constexpr", "OP": "constexpr"}
CONSTANTS = {"N": 64, "OP": "add"}


@pytest.fixture(scope="module")
def kernel():
    return compile_for("sm90", kernels.binary_kernel, SIGNATURE, CONSTANTS)


def good() -> dict:
    return {"x": np.ones(64, np.float32), "y": np.ones(64, np.float32), "out": np.zeros(64, np.float32), "n": 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": 1}, "no parameter 'z'; it has x, y, out, n"),
        ({"n": None}, "n is None; the kernel takes a number"),
        ({"n": 1.5}, "n is 1.5; the kernel takes an integer"),
        ({"n": float("nan")}, "n is nan; the kernel takes an integer"),
        ({"n": float("inf")}, "n is inf; the kernel takes an integer"),
        ({"n": 2**40}, "n is 1099511627776, which does not fit into i32"),
        ({"x": np.ones(64)}, "x has elements f64; the kernel was compiled for a pointer to f32"),
        ({"x": torch.ones(64, dtype=torch.bfloat16)}, "x has elements bf16"),
        ({"x": [1.0]}, "no parameter 'x.0'|x is a list"),
        ({"x": np.ones(64, np.complex64)}, "x has dtype complex64"),
        ({"x": torch.ones(64).to_sparse()}, "x is a Tensor of layout torch.sparse_coo without plain memory"),
        ({"x": TensorDescriptor(np.ones((8, 8), np.float32), (8, 8))}, "x is a descriptor; the kernel was compiled"),
    ],
)
def test_arguments(kernel, change, message):
    with pytest.raises(SimulationError, match=message):
        simulate(kernel, (1,), {**good(), **change})


def test_a_missing_argument(kernel):
    args = good()
    del args["y"]
    with pytest.raises(SimulationError, match="the argument 'y' is missing"):
        simulate(kernel, (1,), args)


def test_a_read_only_array(kernel):
    args = good()
    args["x"].flags.writeable = False
    with pytest.raises(SimulationError, match="x is a read-only array"):
        simulate(kernel, (1,), args)


@pytest.mark.parametrize("grid", [(), (0,), (1, 1, 1, 1), (1 << 20,), 2, ("a",), (2.5,), "2", b"1", None, (True,)])
def test_grids(kernel, grid):
    with pytest.raises(SimulationError, match="grid is"):
        simulate(kernel, grid, good())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_flight": 0}, "in_flight is 0; it must be an integer from 1 on"),
        ({"step_limit": -1}, "step_limit is -1; it must be an integer from 1 on"),
        ({"seed": "x"}, "seed is 'x'; it must be an integer"),
        ({"timing": 3}, "timing is 3; it must be True or False"),
        ({"fixed_order": "yes"}, "fixed_order is 'yes'; it must be True or False"),
        ({"first_finding": 1}, "first_finding is 1; it must be True or False"),
    ],
)
def test_options(kernel, options, message):
    with pytest.raises(SimulationError, match=message):
        simulate(kernel, (1,), good(), **options)


def test_arguments_that_are_no_mapping(kernel):
    with pytest.raises(SimulationError, match="args is None; it must map the names of parameters to values"):
        simulate(kernel, (1,), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_warps": 3}, "num_warps is 3; it must be a power of two up to 32"),
        ({"num_warps": 4.0}, "num_warps is 4.0; it must be a power of two"),
        ({"num_ctas": 32}, "num_ctas is 32; it must be a power of two up to 16"),
        ({"num_stages": "x"}, "num_stages is 'x'; it must be an integer from 1 on"),
        ({"arch": []}, "arch is \\[\\]; it must be one of sm90"),
        ({"kernel": 3}, "kernel is an int; it must be a @triton.jit or @gluon.jit function"),
        ({"signature": None}, "signature is None; it must map the names of parameters to values"),
        ({"constexprs": 3}, "constexprs is 3; it must map"),
        ({"signature": {**SIGNATURE, "n": "int"}}, "the type 'int' is not known to Triton"),
        ({"signature": {**SIGNATURE, "n": ""}}, "the type '' is not known to Triton"),
        ({"signature": {**SIGNATURE, "x": "*fp17"}}, r"the type '\*fp17' is not known to Triton"),
    ],
)
def test_what_nothing_is_compiled_for(change, message):
    given = {"arch": "sm90", "kernel": kernels.binary_kernel, "signature": SIGNATURE, "constexprs": CONSTANTS}
    with pytest.raises(SimulationError, match=message):
        compile_for(**{**given, **change})


def test_schedules_targets_and_kernels(kernel):
    with pytest.raises(SimulationError, match="schedule is 'best'; it must be one of eager, lazy, random, adversarial"):
        simulate(kernel, (1,), good(), schedule="best")
    with pytest.raises(SimulationError, match="arch is 'sm80'"):
        compile_for("sm80", kernels.binary_kernel, SIGNATURE, CONSTANTS)
    with pytest.raises(SimulationError, match="an int is no compiled kernel"):
        simulate(3, (1,), {})
    with pytest.raises(SimulationError, match="no TTGIR"):
        simulate("tt.func", (1,), {})


def test_an_unknown_operation_is_named_with_its_line(kernel):
    text = kernel.asm["ttgir"].replace("arith.addf", "arith.frobnicate")
    with pytest.raises(
        SimulationError, match=r"does not know the operation arith.frobnicate at .*plain.py:\d+"
    ):
        simulate(text, (1,), good())


def test_another_target_is_refused(kernel):
    text = kernel.asm["ttgir"].replace('"cuda:90"', '"cuda:75"')
    with pytest.raises(SimulationError, match=r"compiled for cuda:75; the simulator runs .*cuda:90"):
        simulate(text, (1,), good())


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm103", "gfx942", "gfx950"])
def test_every_target_compiles(arch):
    assert "module" in compile_for(arch, kernels.binary_kernel, SIGNATURE, CONSTANTS).asm["ttgir"]


def test_machine_code_is_made_on_demand():
    built = compile_for("sm90", kernels.binary_kernel, SIGNATURE, CONSTANTS, machine_code=True)
    args = good()
    assert len(built.asm["cubin"]) and simulate(built, (1,), args).clean
    np.testing.assert_array_equal(args["out"], 2)


def test_descriptors():
    from triton.experimental.gluon import language as gl

    from tests.sim.machine.kernels.gluon import copy_kernel

    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    x, out = np.ones((64, 64), np.float16), np.ones((64, 64), np.float16)

    def copied(source) -> None:
        box = TensorDescriptor(source, (64, 64))
        run(
            copy_kernel,
            (1,),
            {"x_desc": box, "out_desc": TensorDescriptor(out, (64, 64))},
            {"FAULT": ""},
            layout=layout,
        )

    copied(x)
    with pytest.raises(SimulationError, match="the last one of a descriptor's tensor must be 1"):
        copied(np.ones((128, 128), np.float16)[::2, ::2])
    with pytest.raises(SimulationError, match="its descriptor has 2 dimensions"):
        copied(np.ones(64, np.float16))
    with pytest.raises(SimulationError, match="x_desc has a stride of 130 bytes; TMA takes multiples of 16"):
        copied(np.ones((64, 65), np.float16)[:, :64])
    with pytest.raises(SimulationError, match=r"x_desc has the address [0-9]+; TMA takes multiples of 16 bytes"):
        copied(np.ones((64, 72), np.float16)[:, 4:68])


@pytest.mark.parametrize("copied", [(65, 64), (64, 32)])
def test_a_map_whose_box_is_no_part_of_the_tile(copied):
    from triton.experimental.gluon import language as gl

    from tests.sim.machine.kernels.gluon import copy_kernel

    layout, x = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16), np.ones((64, 64), np.float16)
    args = {"x_desc": TensorDescriptor(x, (64, 64), copied=copied), "out_desc": TensorDescriptor(x, (64, 64))}
    with pytest.raises(SimulationError, match=r"x_desc copies boxes of .*, which are no first rows of"):
        run(copy_kernel, (1,), args, {"FAULT": ""}, layout=layout)


def test_a_map_with_a_smaller_box_brings_fewer_bytes():
    from triton.experimental.gluon import language as gl

    from tests.sim.machine.kernels.gluon import copy_kernel

    layout, x = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16), np.ones((64, 64), np.float16)
    args = {"x_desc": TensorDescriptor(x, (64, 64), copied=(63, 64)), "out_desc": TensorDescriptor(x, (64, 64))}
    report = run(copy_kernel, (1,), args, {"FAULT": ""}, layout=layout)
    assert [finding.kind for finding in report.findings] == ["Deadlock"]


def test_a_descriptor_that_a_kernel_makes_of_odd_rows():
    kernel, args = kernels.device_descriptor_kernel, {"x": np.ones((8, 12), np.float16), "M": 8, "N": 12}
    with pytest.raises(SimulationError, match="a tensor descriptor of x has a stride of 24 bytes; TMA takes multiples"):
        run(kernel, (1,), {**args, "out": np.zeros((8, 12), np.float16)}, {"B": 8})
