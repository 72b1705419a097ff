"""`launches`: other people's programs in the simulator, unchanged; the pytest marker; scripts on the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as PlainDescriptor
from typer.testing import CliRunner

from tests.sim.machine.kernels import launched as kernels
from warpattn.cli.app import app
from warpattn.sim import SimulationError
from warpattn.sim.host.launches import launches
from warpattn.sim.ops.libdevice import function_of


@pytest.mark.parametrize("arch", ["sm90", "sm100", "sm103", "gfx942", "gfx950"])
def test_a_program_for_a_card_runs_unchanged(arch: str) -> None:
    with launches(arch, seeds=2) as runs:
        x, y = torch.randn(1000, device="cuda"), torch.randn(1000).to("cuda")
        out = torch.empty_like(x)
        kernels.add_kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, out, 1000, BLOCK=256)
    assert torch.equal(out, x + y)
    assert runs.clean and runs.launched[0].grid == (4,) and len(runs.launched[0].reports) == 5


@pytest.mark.parametrize("grid", [(0,), (2, 0), lambda meta: (0, 1, 1)])
def test_a_grid_without_programs_launches_nothing(grid) -> None:
    with launches("sm90") as runs:
        x = torch.zeros(0, device="cuda")
        kernels.add_kernel[grid](x, x, x, 0, BLOCK=256)
    assert runs.clean and not runs.launched
    with launches("sm90"), pytest.raises(SimulationError, match="grid is"):
        kernels.add_kernel[(-1, 0)](x, x, x, 0, BLOCK=256)


def test_nothing_of_it_stays() -> None:
    before = (triton.runtime.driver._active, triton.runtime.jit.JITFunction.run, triton.testing.do_bench)
    with launches("sm90"):
        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        inside = triton.runtime.jit.JITFunction.run
    with pytest.raises(ZeroDivisionError), launches("sm90"):
        raise ZeroDivisionError
    assert inside is not before[1]
    assert before == (triton.runtime.driver._active, triton.runtime.jit.JITFunction.run, triton.testing.do_bench)
    assert not torch.cuda.is_available()


def test_findings_name_the_schedule_and_stay_one_line_each() -> None:
    with launches("sm90", seeds=3) as runs:
        kernels.colliding_kernel[(2,)](torch.randn(32), torch.empty(16), BLOCK=16)
    assert not runs.clean and {finding.kind for finding in runs.findings} == {"Race"}
    line = str(*runs.findings)
    assert "schedule 'eager', seed 0; in 6 of 6 runs" in line and "launched.py:" in line


def test_every_order_starts_from_the_same_memory() -> None:
    count, array = torch.zeros(1, dtype=torch.int32), np.zeros(1, np.float32)
    with launches("sm90", seeds=4) as runs:
        kernels.counting_kernel[(5,)](count)
        kernels.counting_kernel[(3,)](torch.from_numpy(array))
    assert count.item() == 5 and array[0] == 3 and runs.clean


def test_autotuners_take_the_first_configuration_and_nothing_is_timed() -> None:
    a, b = torch.randn(64, 64).half(), torch.randn(64, 64).half()
    c = torch.empty(64, 64).half()
    with launches("sm90", schedules="lazy") as runs:
        kernels.product_kernel[lambda meta: (64 // meta["BLOCK"],) * 2](a, b, c, 64, 64, 64, 64)
        calls: list[int] = []
        assert np.isnan(triton.testing.do_bench(lambda: calls.append(1))) and calls == [1]
    assert runs.clean and [launch.grid for launch in runs.launched] == [(1, 1)]
    assert (c.float() - a.float() @ b.float()).abs().max() < 2e-2
    assert all("ttg.async_copy" in text for text in ttgir_of(kernels.product_kernel.fn)), "num_stages is kept"


def ttgir_of(kernel) -> list[str]:
    """What was compiled of a kernel."""
    from warpattn.sim.host import launches as module

    return [compiled.asm["ttgir"] for compiled in module._compiled[kernel].values()]


def test_kernels_print_and_assert(capsys: pytest.CaptureFixture[str]) -> None:
    with launches("sm90", seeds=2) as runs:
        kernels.talking_kernel[(2,)](torch.tensor([1.5, 7.0]), 4.0)
    assert capsys.readouterr().out.splitlines() == ["pid (0, 0, 0): element: 1.5", "pid (1, 0, 0): element: 7."]
    assert {(finding.kind, finding.message.rpartition(": ")[2]) for finding in runs.findings} == {
        ("AssertionFailed", "too large")
    }


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_functions_of_libdevice(arch: str) -> None:
    x, out = torch.linspace(-0.9, 0.9, 128), torch.empty(384)
    with launches(arch, schedules="eager") as runs:
        kernels.functions_kernel[(1,)](x, out, BLOCK=128)
    exact = x.double()
    expected = torch.cat([torch.asin(exact) + exact**3, torch.erfinv(exact), (x * 10).double().round()])
    assert runs.clean and (out - expected).abs().max() < 1e-6


@pytest.mark.parametrize("symbol", ["__nv_fadd_rz", "__nv_yn", "__ocml_unheard_f32"])
def test_functions_that_are_not_known(symbol: str) -> None:
    assert function_of(symbol)[1] is None


@pytest.mark.parametrize(
    ("symbol", "given", "expected"),
    [("__nv_float2int_rz", -2.7, -2), ("__nv_float2int_rn", 2.5, 2), ("__nv_fast_exp10f", 2.0, 100),
     ("__nv_isinff", np.inf, 1), ("__nv_roundf", -2.5, -3),
     ("__ocml_rsqrt_f64", 4.0, 0.5), ("__nv_remainderf", 5.5, -0.5)],
)  # fmt: skip
def test_functions_by_symbol(symbol: str, given: float, expected: float) -> None:
    function = function_of(symbol)[1]
    assert function is not None
    values = (given, 2.0) if "remainder" in symbol else (given,)
    assert float(function(*map(np.float64, values))) == pytest.approx(expected, rel=1e-15)


def test_tuples_and_numbers_that_are_one() -> None:
    out = torch.empty(1)
    with launches("sm90", schedules="eager") as runs:
        kernels.pairs_kernel[(1,)]((3.0, 1), torch.tensor([2.0]), out)
    assert out.item() == 7 and runs.clean


def test_a_tensor_of_addresses_reaches_the_tensors() -> None:
    rows, out = [torch.randn(16) for _ in range(3)], torch.empty(48)
    table = torch.tensor([row.data_ptr() for row in rows])
    without_address = torch.eye(4).to_sparse()
    with launches("sm90") as runs:
        kernels.grouped_kernel[(3,)](table, out, BLOCK=16)
    assert torch.equal(out, torch.cat(rows)) and runs.clean and without_address.is_sparse


@pytest.mark.parametrize("waits", [True, False])
def test_descriptors_of_the_host(waits: bool) -> None:
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    source, target = torch.randn(64, 64).half(), torch.zeros(64, 64).half()
    with launches("sm90") as runs:
        pair = (TensorDescriptor.from_tensor(x, [64, 64], layout) for x in (source, target))
        kernels.tma_copy_kernel[(1,)](*pair, waits=waits)
    assert runs.clean == waits and (not waits or torch.equal(source, target))


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_descriptors_that_triton_takes_apart_for_amd(arch: str) -> None:
    x, out = torch.randn(60, 64), torch.zeros(60, 64)
    with launches(arch, schedules="lazy") as runs:
        pair = [PlainDescriptor.from_tensor(each, [32, 64]) for each in (x, out)]
        kernels.double_kernel[(2,)](*pair)
    assert runs.clean and torch.equal(out, 2 * x)


def test_warmup_compiles_and_runs_nothing() -> None:
    x = torch.ones(256)
    with launches("sm90") as runs:
        compiled = kernels.add_kernel.warmup(x, x, x, 256, BLOCK=256, grid=(1,))
        compiled._init_handles()
    assert compiled.n_regs > 0 and compiled.metadata.num_warps == 4 and not runs.launched and x.sum() == 256


@pytest.mark.parametrize(
    ("given", "message"),
    [({"arch": "sm80"}, "arch is 'sm80'"), ({"seeds": 0}, "seeds is 0"), ({"schedules": "slow"}, "has 'slow'")],
)
def test_what_is_refused(given: dict, message: str) -> None:
    with pytest.raises(SimulationError, match=message), launches(**{"arch": "sm90", **given}):
        pass


PROGRAM = """
import sys
import torch, triton
from tests.sim.machine.kernels import launched as kernels
x = torch.ones(int(sys.argv[1]), device="cuda")
kernels.{kernel}
print("done", *sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("kernel", "status"),
    [("add_kernel[(2,)](x, x, torch.empty_like(x), 100, BLOCK=64)", 0),
     ("colliding_kernel[(2,)](x, torch.empty(16), BLOCK=16)", 1)],
    ids=["right", "wrong"],
)  # fmt: skip
def test_scripts(tmp_path: Path, kernel: str, status: int) -> None:
    script, timeline = tmp_path / "program.py", tmp_path / "t.json"
    script.write_text(PROGRAM.format(kernel=kernel))
    line = ("simulate", str(script), "100", "--flag", "--seeds", "2", "--timeline", str(timeline))
    found = CliRunner().invoke(app, line)
    assert found.exit_code == status and "done 100 --flag" in found.output, found.output
    assert f"{'1 finding' if status else '0 findings'} in 5 runs" in found.output
    assert json.loads(timeline.read_text()) and sys.argv[0] != str(script)


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["simulate", str(tmp_path / "nothing.py")])
    assert found.exit_code == 1 and "there is no such file" in found.output


TESTS = """
import pytest, torch
from tests.sim.machine.kernels import launched as kernels

@pytest.mark.warpsim("sm90", seeds=2)
def test_right():
    x = torch.ones(64, device="cuda")
    kernels.add_kernel[(1,)](x, x, x, 64, BLOCK=64)
    assert x.sum() == 128

@pytest.mark.warpsim(arch="gfx950")
def test_wrong():
    kernels.colliding_kernel[(2,)](torch.ones(32), torch.empty(16), BLOCK=16)

@pytest.mark.warpsim("sm90")
def test_empty():
    pass

def test_unmarked():
    assert not torch.cuda.is_available()
"""


def test_the_pytest_marker(tmp_path: Path) -> None:
    (tmp_path / "test_kernels.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "warpattn.sim.host.pytest_plugin", "-p", "no:cacheprovider"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "2 failed, 2 passed" in found.stdout, found.stdout + found.stderr
    assert "Race: colliding_kernel of program (1, 0, 0)" in found.stdout
    assert "test_empty is marked warpsim and launched no kernel" in found.stdout


def test_what_programs_ask_a_card_for_is_answered() -> None:
    """Streams and events, which order nothing here; memory in use; where a tensor is."""
    with launches("sm90") as runs:
        x = torch.ones(64, device=torch.device("cuda", 0))
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.cuda.device(0):
            kernels.add_kernel[(1,)](x, x, x, 64, BLOCK=64)
        event.record(stream)
        event.synchronize()
        torch.cuda.manual_seed(0)
        torch.cuda.reset_peak_memory_stats()
        assert x.is_cuda and event.query() and torch.cuda.max_memory_allocated() == 0
        with pytest.raises(SimulationError, match="CUDA graphs are not simulated"):
            torch.cuda.CUDAGraph()
    assert runs.clean and x.sum() == 128


def test_a_tensor_without_an_address_is_one_sentence() -> None:
    x, out = torch.eye(16).to_sparse(), torch.empty(16)
    words = "x is a Tensor of layout torch.sparse_coo without plain memory; the simulator takes dense"
    with launches("sm90"), pytest.raises(SimulationError, match=words):
        kernels.add_kernel[(1,)](x, out, out, 16, BLOCK=16)
    with launches("sm90"), pytest.raises(SimulationError, match="out is a Tensor of layout"):
        kernels.add_kernel[(1,)](out, out, out=x, n=16, BLOCK=16)
