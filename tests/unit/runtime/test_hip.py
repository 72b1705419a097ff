"""The way to an AMD card, up to the driver call, with a library that only takes notes: no card and no ROCm here."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon import GluonASTSource

from tests.sim.amd import attention as amd_attention
from tests.sim.calls.test_append import inputs, tables
from tests.unit.machine_code.gcn_builds import ARCHS, attention, ring
from tests.unit.machine_code.gcn_knockouts import machine_code
from warpattn.kernels.cache.launch import NewRows, append_launches
from warpattn.machine_code.gcn import summary
from warpattn.problem.launch import Launch
from warpattn.runtime import bound_launches, compiler, cuda, hip, kernel_cache
from warpattn.runtime.bound_launches import launch_all
from warpattn.runtime.hip import Argument
from warpattn.runtime.tile_counters import TileCounters

OUT_OF_MEMORY = 2


class Library:
    """HIP with a notebook; `errors` are the codes that calls of a name return."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.calls: list[str] = []
        self.loaded: list[tuple[bytes, bytes]] = []
        self.launches: list[dict[str, Any]] = []
        self.code = b""
        self.hipModuleLaunchKernel = lambda *arguments: self._launch(*arguments)
        self.hipGetErrorName = lambda code: b"hipErrorOutOfMemory" if code == OUT_OF_MEMORY else None
        self.hipGetErrorString = lambda code: b"out of memory"

    def _called(self, name: str) -> int:
        self.calls.append(name)
        return self.errors.get(name, 0)

    def hipThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value = 7 if mode._obj.value == 2 else 2
        return self._called("exchange")

    def hipModuleLoadData(self, module: Any, code: bytes) -> int:
        module._obj.value, self.code = 11, code
        return self._called("load")

    def hipModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = 40 + module.value
        self.loaded.append((self.code, name))
        return self._called("function")

    def _launch(self, *arguments: Any) -> int:
        *numbers, table, extra = arguments
        (pointer, address, size, size_at, end) = extra
        assert (pointer, size, end, table) == (1, 2, 3, None)
        packed = ctypes.string_at(address, ctypes.c_size_t.from_address(size_at).value)
        self.launches.append({"numbers": numbers, "packed": packed, "address": address})
        return self._called("launch")


@pytest.fixture(name="hip_library")
def _hip_library(monkeypatch, tmp_path) -> Library:
    found = Library()
    monkeypatch.setattr(hip, "library", lambda: found)
    monkeypatch.setattr(bound_launches, "_loaded", {})
    monkeypatch.setattr(bound_launches, "tile_counters", lambda device: TileCounters(torch.device("cpu")))
    monkeypatch.setattr(cuda, "current_stream", lambda device: 1000 + device)
    monkeypatch.setenv("WARPATTN_CACHE_DIR", str(tmp_path))
    kernel_cache.forget()
    yield found
    kernel_cache.forget()


def kept(step: Launch) -> kernel_cache.Artifact:
    """The code object of a launch, from memory, disk or the compiler."""
    return kernel_cache.find((step.name, step.arch, step.key), lambda: compiler.artifact_of(step))


def tensors() -> dict[str, Any]:
    q, k, v = (torch.randn(64, 64).bfloat16() for _ in range(3))
    return {"q": q, "k": k, "v": v, "out": torch.full((64, 64), torch.nan), "n": 64, "scale": 0.25}


def step(arch: str = "gfx950", args: dict[str, Any] | None = None) -> Launch:
    """A launch of the small attention kernel."""
    constants = {"VERSION": 3 if arch == "gfx942" else 4, "FAULT": ""}
    signature = {**dict.fromkeys("qkv", "*bf16"), "out": "*fp32", "n": "i32", "scale": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    hints = {(i,): [["tt.divisibility", 16], ["tt.pointer_range", 32]] for i in range(4)}

    def source() -> Any:
        return GluonASTSource(amd_attention.attention_kernel, signature, constants, hints)

    options = {"num_warps": 4, "enable_fp_fusion": True}
    return Launch("test.attention", arch, ("small",), source, options, (1, 2), tensors() if args is None else args)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_layout_is_the_one_that_the_code_object_states(arch):
    kinds = ["ptr", "ptr", "ptr", "ptr", "i32", "f32", "ptr", "ptr"]
    assert hip.layout(kinds) == hip.stated_layout(attention(arch)) != ()
    assert hip.layout(["ptr", "ptr", "i32", "ptr", "ptr"]) == hip.stated_layout(ring(arch))


def test_arguments_lie_at_multiples_of_their_size():
    assert hip.layout(["i32", "ptr", "i32", "f32", "i32", "i64"]) == (
        Argument(0, 4), Argument(8, 8), Argument(16, 4), Argument(20, 4), Argument(24, 4), Argument(32, 8),
    )  # fmt: skip
    assert hip.layout([]) == ()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_launch(arch, hip_library):
    wanted = step(arch)
    launch_all([wanted], 3)
    (note,) = hip_library.launches
    function, *grid_and_block, shared, stream = note["numbers"]
    assert (function, grid_and_block, stream) == (51, [1, 2, 1, 256, 1, 1], 1003)
    assert shared == 16_384, "two slots of 32 keys of K and V"
    args = wanted.args
    addresses = [args[name].data_ptr() for name in ("q", "k", "v", "out")]
    assert struct.unpack("4Q i f 2Q", note["packed"]) == (*addresses, 64, 0.25, 0, 0)
    assert note["address"] % 64 == 0
    ((code, name),) = hip_library.loaded
    assert code.startswith(b"\x7fELF") and name == b"attention_kernel"


@pytest.mark.parametrize("arch", ARCHS)
def test_new_keys_for_a_cache(arch, hip_library):
    kv, k_new, v_new = inputs(3, 128, 64, torch.bfloat16)
    (wanted,) = append_launches(arch, kv, NewRows(k_new, v_new, tables(32), False))
    launch_all([wanted], 0)
    (note,) = hip_library.launches
    rows = 5 * 3 * k_new.shape[2]  # of sequences, tokens and heads, 32 a program
    assert note["numbers"][1:7] == [-(-rows // 32), 1, 1, 256, 1, 1]
    strides = [stride // 8 for stride in kv.k_pages.stride()[:3]]  # in runs of 16 bytes
    assert struct.unpack("Q3q", note["packed"][:32]) == (kv.k_pages.data_ptr(), *strides)
    found = summary(machine_code(wanted))
    assert found.vgpr_spills == found.sgpr_spills == found.scratch == 0


def test_a_second_launch_loads_nothing(hip_library):
    launch_all([step()], 0)
    launch_all([step(args=tensors())], 0)
    assert len(hip_library.launches) == 2 and len(hip_library.loaded) == 1
    launch_all([step()], 1)
    assert len(hip_library.loaded) == 2, "another device"
    assert hip_library.loaded[0] == hip_library.loaded[1]


def test_a_second_process_does_not_compile(hip_library, monkeypatch):
    made = kept(step())
    kernel_cache.forget()
    monkeypatch.setattr("triton.compile", lambda *_, **__: pytest.fail("compiled again"))
    assert kept(step()) == made
    assert made.threads == 256 and [p.kind for p in made.parameters] == ["ptr"] * 4 + ["i32", "f32"]
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        kept(step("gfx942"))


def test_missing_tensors_are_null(hip_library):
    launch_all([step(args=tensors() | {"v": None})], 0)
    assert struct.unpack_from("3Q", hip_library.launches[0]["packed"])[2] == 0


def test_launches_are_repeated_on_other_tensors(hip_library):
    first, other = tensors(), tensors()
    names = ("q", "k", "v", "out")
    bound = launch_all([step(args=first)], 0)
    bound.follow([first[name] for name in names])
    bound(tuple(other[name].data_ptr() for name in names), ())
    notes = [struct.unpack("4Q i f 2Q", note["packed"]) for note in hip_library.launches]
    assert notes == [(*(x[name].data_ptr() for name in names), 64, 0.25, 0, 0) for x in (first, other)]
    assert len(hip_library.loaded) == 1


def test_modules_are_loaded_in_the_relaxed_mode_of_capture(hip_library):
    hip.load_function(b"code", "entry", 0)
    assert hip_library.calls == ["exchange", "load", "function", "exchange"]


@pytest.mark.parametrize(
    ("call", "said"),
    [("load", "hipModuleLoadData"), ("function", "hipModuleGetFunction"), ("launch", "launch of test.attention")],
)
def test_a_failed_call_is_one_error_with_hips_name(call, said, hip_library):
    hip_library.errors[call] = OUT_OF_MEMORY
    with pytest.raises(RuntimeError, match=f"^{said} failed with HIP error 2, hipErrorOutOfMemory: out of memory$"):
        launch_all([step()], 0)
    assert hip_library.calls.count("exchange") == 2, "the mode is set back"


def test_an_error_without_a_name(hip_library):
    with pytest.raises(RuntimeError, match=r"^call failed with HIP error 98, unknown error: out of memory$"):
        hip.check(98, "call")
    hip.check(0, "call")


def test_a_layout_that_differs_is_refused(hip_library, monkeypatch):
    monkeypatch.setattr(hip, "layout", lambda kinds: ())
    with pytest.raises(RuntimeError, match=r"^kernel test\.attention takes its arguments at .* written to \(\)$"):
        kept(step())


def test_parameters_are_rewritten_in_place():
    memory = hip.Parameters(["i32", "ptr", "f32"])
    for i, value in enumerate((-3, 2**40, 0.5)):
        memory.cells[i].value = value
    start = memory.addresses[0]
    assert struct.unpack("i 4x Q f", ctypes.string_at(start, 20)) == (-3, 2**40, 0.5)
    memory.cells[1].value = 7
    assert struct.unpack_from("Q", ctypes.string_at(start + 8, 8)) == (7,)


def test_which_library_is_loaded(monkeypatch):
    monkeypatch.setattr(hip, "_candidates", lambda: ["libnot_there.so", "libc.so.6", "libm.so.6"])
    hip.library.cache_clear()
    assert hip.library()._name == "libc.so.6"
    monkeypatch.setattr(hip, "_candidates", lambda: ["libnot_there.so"])
    hip.library.cache_clear()
    with pytest.raises(RuntimeError, match=r"^libamdhip64\.so could not be loaded: a torch built for ROCm brings it"):
        hip.library()


def test_the_copy_that_torch_has_mapped_comes_first():
    line = "7f00-7f10 r-xp 00000000 08:01 42   /usr/torch/lib/libamdhip64.so.7\n"
    other = "7f20-7f30 r-xp 00000000 08:01 43   /usr/torch/lib/libamdhip64.so.7.1 (deleted)\n7f40 libc.so.6\n"
    assert hip._mapped(line + line + other) == ["/usr/torch/lib/libamdhip64.so.7"]
    assert hip._mapped("") == []
    assert list(hip._candidates())[-3:] == list(hip._NAMES)
