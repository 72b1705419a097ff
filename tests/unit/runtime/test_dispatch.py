"""Launches of every kernel, up to the driver call: parameters, tensor maps, devices, and what is kept between calls."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import warpattn as wa
from warpattn.problem import Call, CheckedCall, backends, validate
from warpattn.problem.operands import Operands
from warpattn.runtime import bound_launches, compiler, cuda, kernel_cache, kernel_parameters
from warpattn.runtime.bound_launches import BoundLaunches, launch_all
from warpattn.runtime.launches import list_launches
from warpattn.runtime.tile_counters import TileCounters
from warpattn.sequences import Dense, PagedRagged, Sequence, Sizes
from warpattn.serving import plans


@dataclass
class Driver:
    """What would have reached the driver."""

    launches: list[tuple[Any, ...]] = field(default_factory=list)
    pdl: list[int] = field(default_factory=list)  # which of them may start before the preceding one ends
    maps: list[cuda.TensorMapLayout] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)  # what kernels were compiled for
    chip: str = "sm100"  # where Blackwell's are launched


@pytest.fixture
def driver(monkeypatch):
    found = Driver()

    def launch_call(function, grid, threads, shared, table, *, pdl=False):
        def launch(stream):
            if pdl:
                found.pdl.append(len(found.launches))
            found.launches.append((function, *grid, threads, shared, stream))
            return 0

        return launch

    def replaced(target, address):
        found.replaced.append(address)
        return 0

    def compiled(step, target):
        found.targets.append(target)
        metadata = SimpleNamespace(name=step.name, shared=1000, num_warps=8)
        return SimpleNamespace(metadata=metadata, asm={"cubin": b"code"}, src=step.source())

    for owner, name, value in (
        (cuda, "launch_call", launch_call),
        (cuda, "replace_address_call", lambda: replaced),
        (cuda, "load_function", lambda *_: 77),
        (cuda, "bind_context", lambda device: None),
        (cuda, "current_stream", lambda device: 5),
        (cuda, "current_device", lambda: -1),
        (cuda.TensorMapLayout, "encode", lambda layout, target, address: found.maps.append(layout)),
        (compiler, "compiled", compiled),
        (bound_launches, "chip_of", lambda device: backends.Chip("sm100", "", found.chip)),
        (bound_launches, "_loaded", {}),
        (bound_launches, "tile_counters", lambda device: TileCounters(torch.device("cpu"))),
        (bound_launches, "processors", lambda device: 132),
        (cuda, "is_capturing", lambda: False),
        (kernel_cache, "find", lambda key, build: build()),
    ):
        monkeypatch.setattr(owner, name, value)
    return found


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def call(kind: str, queries: int) -> Call:
    lengths = torch.tensor([90, 33], dtype=torch.int32)
    if kind == "ragged":
        cu = torch.tensor([0, 40, 97], dtype=torch.int32)
        return Call(half(97, 4, 64), half(97, 2, 64), half(97, 2, 64), wa.Ragged(cu), wa.Causal())
    if kind == "paged":
        table = torch.arange(12, dtype=torch.int32).reshape(2, 6)
        kv = wa.PagedKV(half(12, 16, 2, 64), half(12, 16, 2, 64), table, lengths)
        if queries == 0:
            cu = torch.tensor([0, 1, 41], dtype=torch.int32)
            return Call(half(41, 4, 64), kv.k_pages, kv.v_pages, PagedRagged(kv, wa.Ragged(cu)), wa.Causal())
        return Call(half(2, queries, 4, 64), kv.k_pages, kv.v_pages, kv, wa.Causal())
    mask = wa.Padding(torch.tensor([500, 600])) & wa.Causal()
    return Call(half(2, queries, 4, 64), half(2, 700, 2, 64), half(2, 700, 2, 64), Dense(), mask)


def prepared(arch: str, asked: Call) -> tuple[CheckedCall, Operands, Sequence]:
    ready = replace(validate(replace(asked, return_lse=True, backend="reference")), backend=arch)
    lse = torch.empty(ready.lse_shape)
    return ready, Operands(asked.q, asked.k, asked.v, torch.empty_like(asked.q), lse, None), asked.sequence


CASES = [("dense", 1), ("dense", 300), ("ragged", 0), ("paged", 1), ("paged", 40)]
MIXED = ("paged", 0)  # ragged queries


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize(("kind", "queries"), CASES)
def test_every_kernel_reaches_the_driver(arch, kind, queries, driver):
    ready, x, sequence = prepared(arch, call(kind, queries))
    wanted = list_launches(ready, x, sequence)
    launch_all(wanted, -1)
    assert [launch[1:4] for launch in driver.launches] == [(*step.grid, 1, 1)[:3] for step in wanted]
    assert driver.pdl == [i for i, step in enumerate(wanted) if step.pdl]
    assert [step.pdl for step in wanted] == [arch == "sm90"] * len(wanted)
    for launch in driver.launches:
        assert launch[0] == 77 and launch[4:] == (256, 1000, 5)
    taken = [value for step in wanted for value in kernel_parameters.parameters(step.source().signature)]
    maps = [value for value in taken if value.kind == "map"]
    assert [layout.box[:-1] for layout in driver.maps] == [parameter.box[:-1] for parameter in maps]
    for layout in driver.maps:
        assert len(layout.strides) == len(layout.shape) - 1 and all(s % 16 == 0 and s < 2**40 for s in layout.strides)
        assert all(0 < n <= 256 for n in layout.box) and layout.box[-1] * 2 <= max(layout.swizzle, 16)


@pytest.mark.parametrize(("arch", "queries", "across"), [("sm90", 40, True), ("sm90", 1, False), ("sm100", 40, False)])
def test_values_are_followed_in_the_form_that_is_read(arch, queries, across, driver):
    """Transposed ones by products of 8 bits on Hopper; neither of them, if a launch has a copy."""
    q, k = (wa.quantize(half(2, n, heads, 64), per="head") for n, heads in ((queries, 4), (70, 2)))
    v = wa.quantize(half(2, 70, 2, 64), per="head", transposed=True)
    sequence = Dense(k.scale, v.scale, q.scale, v_transposed=v.transposed)
    asked = Call(q.values, k.values, v.values, sequence, backend="reference")
    ready, out = replace(validate(asked), backend=arch), half(2, queries, 4, 64)
    x = Operands(q.values, k.values, v.values, out, None, None)
    launches = list_launches(ready, x, sequence)
    bound = launch_all(launches, -1)
    bound.follow_call(ready, x, sequence)
    read = {i for i, _ in (*bound._cells, *bound._maps)}
    place = len(x) + list(sequence.indices()).index("v.transposed")
    assert (place in read, 2 in read) == (across, not across)
    copied = x._replace(v=v.values.clone())
    other = replace(sequence, v_transposed=v.transposed.clone())
    with pytest.raises(LookupError, match="copied"):
        launch_all(launches, -1).follow_call(ready, copied, other)


def test_ragged_queries_over_pages_are_three_launches(driver):
    ready, x, sequence = prepared("sm90", call(*MIXED))
    wanted = list_launches(ready, x, sequence)
    launch_all(wanted, -1)
    assert [step.name for step in wanted] == ["sm90.order", "sm90.prefill_varlen", "sm90.decode"]
    assert len(driver.launches) == 3 and driver.pdl == [0, 1, 2]


@pytest.mark.parametrize(("kind", "queries"), [*(case for case in CASES if case != ("dense", 300)), MIXED])
def test_kept_launches_only_write_addresses(kind, queries, driver):
    ready, x, sequence = prepared("sm90", call(kind, queries))
    launches = list_launches(ready, x, sequence)
    repeat = BoundLaunches(launches, x.q.get_device())
    repeat.follow_call(ready, x, sequence)
    encoded = len(driver.maps)
    at = tuple(range(16, 16 * 20, 16))[: 6 + len(sequence.indices())]
    values = list(range(100, 100 + sum(1 + 2 * t.ndim for t in ready.mask.tensors)))
    repeat(at, values)
    repeat(at, values)
    assert len(driver.launches) == 2 * len(launches) and len(driver.maps) == encoded
    first = at[:4] if kind == "ragged" else at[1:3]
    assert set(first) & set(driver.replaced) and len(driver.replaced) == len(driver.maps), "each map once"


def test_tensors_that_cannot_be_told_apart_are_not_kept(driver):
    asked = call("dense", 1)
    ready, x, sequence = prepared("sm90", replace(asked, v=asked.k))
    bound = BoundLaunches(list_launches(ready, x, sequence), x.q.get_device())
    with pytest.raises(LookupError, match="given for two"):
        bound.follow_call(ready, x, sequence)


def test_a_plan_for_serving_launches_what_a_call_would(driver, monkeypatch):
    asked = call("paged", 1)
    kv = asked.sequence
    monkeypatch.setattr(plans, "validate", lambda asked, *others: replace(validate(asked, *others), backend="sm90"))
    plan = wa.DecodePlan(asked.q, kv, mask=wa.Causal())
    assert plan(asked.q, kv) is plan.out
    assert len(driver.launches) >= 1 and plan.out.shape == asked.q.shape


def test_a_plan_runs_on_its_own_device(driver, monkeypatch):
    """Whichever is the current one; its driver calls are made with its own device current."""
    asked = call("paged", 1)
    monkeypatch.setattr(plans, "validate", lambda asked, *others: replace(validate(asked, *others), backend="sm90"))
    plan, within = wa.DecodePlan(asked.q, asked.sequence, mask=wa.Causal()), []

    class Device:
        def __init__(self, number: int) -> None:
            self.number = number

        def __enter__(self) -> None:
            within.append((self.number, len(driver.launches)))

        def __exit__(self, *_: object) -> None:
            within.append((self.number, len(driver.launches)))

    monkeypatch.setattr(torch.cuda, "device", Device)
    plan(asked.q, asked.sequence)
    assert len(driver.launches) == 1 and not within
    monkeypatch.setattr(cuda, "current_device", lambda: 3)
    plan(asked.q, asked.sequence)
    assert within == [(-1, 1), (-1, 2)]


def latents(tokens: int = 1) -> tuple[wa.LatentQuery, wa.PagedKV]:
    cache, table = half(12, 16, 1, 576), torch.arange(12, dtype=torch.int32).reshape(2, 6)
    kv = wa.PagedKV(cache, cache[..., :512], table, torch.tensor([90, 33], dtype=torch.int32))
    return wa.LatentQuery(half(2, tokens, 16, 512), half(2, tokens, 16, 192)[..., 128:]), kv


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_a_plan_follows_queries_in_two_tensors(arch, driver, monkeypatch):
    monkeypatch.setattr(plans, "validate", lambda asked, *others: replace(validate(asked, *others), backend=arch))
    q, kv = latents()
    plan = wa.DecodePlan(q, kv, mask=wa.Causal())
    other, _ = latents()
    plan(other, kv)
    for part, x in (("latent", other.nope), ("rope", other.rope)):
        assert [cell.value for cell in plan._bound.cells(f"q.{part}.pointer")] == [x.data_ptr()]
    out = torch.empty_like(plan.out)
    inside = wa.LatentQuery(other.nope, out[..., 512 - 64 :].as_strided(other.rope.shape, other.rope.stride()))
    with pytest.raises(wa.AttentionError, match=r"out shares memory with q\.rope"):
        plan(inside, kv, out)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_steps_of_latent_attention(arch, driver, monkeypatch):
    """A batch-invariant one has keys in no parts, so one launch and no workspace."""
    monkeypatch.setattr(plans, "validate", lambda asked, *others: replace(validate(asked, *others), backend=arch))
    q, kv = latents()
    kv = kv.with_fields(block_table=kv.block_table.repeat(1, 200))
    rows = wa.LatentQuery(q.nope.flatten(0, 1), q.rope.flatten(0, 1))
    seq = wa.Ragged(torch.tensor([0, 1, 2], dtype=torch.int32), max_q=1)
    out = wa.StepPlan(rows, kv, seq, batch_invariant=True)(rows, kv, seq)
    assert out.shape == (2, 16, 512) and len(driver.launches) == 1
    wa.StepPlan(rows, kv, seq)(rows, kv, seq)
    assert len(driver.launches) == 3, "attention, and its parts"


class NoOperations(TorchDispatchMode):
    """Refuses everything that torch does with tensors, so whatever would make one."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        raise AssertionError(f"{operation} was called")


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("kind", ["dense", "paged", "ragged", "ragged 8 bits"])
def test_a_step_of_a_plan_allocates_nothing(kind, lse, driver, monkeypatch):
    """The plan's own output or the caller's, on other tensors than it was made for: addresses are written, no more."""
    monkeypatch.setattr(plans, "validate", lambda asked, *others: replace(validate(asked, *others), backend="sm90"))
    first, other = (call(kind.partition(" ")[0], 1) for _ in range(2))
    tail = {"mask": first.mask, "return_lse": lse}
    narrow = [[wa.quantize(x, per="head") for x in (each.k, each.v)] for each in (first, other)]
    made = {
        "dense": lambda: wa.DecodePlan(first.q, (first.k, first.v), **tail),
        "paged": lambda: wa.DecodePlan(first.q, first.sequence, **tail, kv_ready_before_dependency=True),
        "ragged": lambda: wa.PrefillPlan(first.q, first.k, first.v, first.sequence, **tail),
        "ragged 8 bits": lambda: wa.PrefillPlan(first.q, *narrow[0], first.sequence, **tail),
    }
    plan, out = made[kind](), torch.empty_like(first.q)
    tensors = {"dense": (other.q, (other.k, other.v)), "paged": (other.q, other.sequence),
               "ragged 8 bits": (other.q, *narrow[1], other.sequence)}  # fmt: skip
    step = tensors.get(kind, (other.q, other.k, other.v, other.sequence))
    with pytest.raises(AssertionError, match=r"aten\.empty"), NoOperations():
        torch.empty(1)
    with NoOperations():
        plan(*step)
        launched = len(driver.launches)
        plan(*step, out)
    assert launched and len(driver.launches) == 2 * launched


@pytest.mark.parametrize("pdl", [False, True])
def test_what_the_driver_is_told(pdl, monkeypatch):
    """cuLaunchKernelEx gets the sizes, the stream and, with PDL, one attribute: programmatic stream serialization."""
    seen = []

    def launch(at, function, table, extra):
        sizes = list((ctypes.c_uint * 7).from_address(at))
        stream, attributes = (ctypes.c_void_p * 2).from_address(at + 32)
        count = ctypes.c_uint.from_address(at + 48).value
        allowed = [list((ctypes.c_int * 3).from_address(attributes + 72 * i)) for i in range(count)]
        seen.append((sizes, stream, allowed, function, table, extra))
        return 3

    monkeypatch.setattr(cuda, "driver", lambda: SimpleNamespace(cuLaunchKernelEx=launch))
    call = cuda.launch_call(77, (4, 2, 1), 160, 1000, 9, pdl=pdl)
    assert call(5) == call(0) == 3
    told = ([4, 2, 1, 160, 1, 1, 1000], 5, [[6, 0, 1]] if pdl else [], 77, 9, None)
    assert seen == [told, (told[0], None, *told[2:])]


def test_a_failed_launch_is_an_error(driver, monkeypatch):
    ready, x, sequence = prepared("sm90", call("paged", 1))
    monkeypatch.setattr(cuda, "launch_call", lambda *_, pdl: lambda stream: 9)
    monkeypatch.setattr(cuda, "driver", lambda: SimpleNamespace(cuGetErrorString=lambda code, text: None))
    with pytest.raises(RuntimeError, match=r"launch of sm90\.decode failed with CUDA error 9"):
        launch_all(list_launches(ready, x, sequence), -1)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((9, 0), "sm90"), ((10, 0), "sm100"), ((10, 3), "sm100"), ((8, 0), None), ((8, 9), None), ((12, 0), None)],
)
def test_nvidia_devices(capability, arch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chip = backends.chip_of(torch.device("cuda", 0))
    assert chip.arch == arch and chip.words == f"CUDA capability {capability[0]}.{capability[1]}"


@pytest.mark.parametrize("chip", ["sm100", "sm103"])
def test_blackwells_kernels_are_compiled_for_the_chip_that_runs_them(chip, driver):
    driver.chip = chip
    ready, x, sequence = prepared("sm100", call("dense", 300))
    launch_all(list_launches(ready, x, sequence), -1)
    assert set(driver.targets) == {chip}


@pytest.mark.parametrize(
    ("name", "arch"), [("gfx942:sramecc+", "gfx942"), ("gfx950", "gfx950"), ("gfx90a", None), ("gfx1100", None)]
)
def test_amd_devices(name, arch, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=name))
    assert backends.chip_of(torch.device("cuda", 0)).arch == arch


def test_parameters_are_read_from_types_and_back():
    layout = "NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)"
    signature = {"x": f"tensordesc<bf16[8, 32],{layout}>", "n": ("i32", ("*fp32", "i64")), "c": "constexpr"}
    found = kernel_parameters.parameters(signature)
    assert [(p.name, p.kind) for p in found] == [("x", "map"), ("n.0", "i32"), ("n.1.0", "ptr"), ("n.1.1", "i64")]
    kernel = bound_launches.LoadedKernel.of(kernel_cache.Artifact(b"", "", 0, 0, found), 0, 1)
    assert kernel.kinds == ("map", "i32", "i32", "i64", "i64", "i32", "ptr", "i64", "ptr", "ptr")
    assert kernel.first == (0, 5, 6, 7)
    assert (found[0].box, found[0].swizzle, found[0].dtype) == ((8, 32), 64, "bf16")
    assert tuple(kernel_parameters.Parameter(**p.fields()) for p in found) == found
    args = {"x": 1, "n": (2, (3, 4)), "unused": 5, "shape": Sizes(1, 2, 3, 4, 5, 6, 7)}
    assert [bound_launches.argument(args, p.name) for p in found] == [1, 2, 3, 4]
    assert bound_launches.argument(args, "shape.dim_v") == 7
