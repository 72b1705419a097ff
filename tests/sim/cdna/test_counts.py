"""LDS, waves, copies and waits of compiled kernels are those of their configs."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.sim.cdna.calls import ARCHS, Case, outputs, prefill_choice, ready_of
from warpattn.kernels.amd.kv_config import WAVE
from warpattn.kernels.cdna.config import CDNAConfig
from warpattn.kernels.cdna.launch import launches_of_choice
from warpattn.masks import Causal
from warpattn.problem.arch import triton_target
from warpattn.problem.launch import Choice
from warpattn.problem.operands import Operands, fitted
from warpattn.sim import compile as compiler

both = pytest.mark.parametrize("arch", ARCHS)


def built(case: Case, arch: str, kind: str = "", **changes: Any) -> tuple[CDNAConfig, str]:
    """The config and the TTGIR of the first kernel of a case: prefill with these buffers, or the planner's choice."""
    call = case.call()
    choice: Choice | None = prefill_choice(call, arch, kind, **changes) if kind else None
    ready, given = ready_of(call, arch), call.sequence.operands(call.q, call.k, call.v).values()
    launch = launches_of_choice(
        ready, fitted(Operands(*given, *outputs(call, ready), call.sinks)), call.sequence, choice
    )[0]
    kernel = compiler.to_ttgir(launch.source(), triton_target(arch), dict(launch.options))
    return launch.key[0], kernel.asm["ttgir"]


def check_memory(config: CDNAConfig, text: str) -> None:
    """The buffers of K and V are all that is allocated; waves are the config's."""
    shapes = [tuple(map(int, found.split("x"))) for found in re.findall(r"ttg\.local_alloc :.*memdesc<([\dx]+)x", text)]
    assert shapes == [(config.buffers.slots, *config.k.btile), (config.buffers.slots, *config.v.btile)]
    assert sum(config.element.bytes * a * b * c for a, b, c in shapes) == config.lds_bytes
    assert f'"ttg.num-warps" = {config.waves} ' in text and f'"ttg.threads-per-warp" = {WAVE} ' in text


def copies_and_waits(text: str) -> tuple[int, list[int]]:
    """Copies to LDS in the code, and the copies that each wait leaves in flight."""
    copies = len(re.findall(r"buffer_load_to_local|async_copy_global_to_local", text))
    return copies, [int(left) for left in re.findall(r"async_wait \{num = (\d+)", text)]


@both
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_ring_copies_and_waits_as_its_config_says(arch: str, slots: int) -> None:
    config, text = built(Case(40, 300, dim=64, mask=Causal()), arch, "ring", slots=slots)
    check_memory(config, text)
    copies, waits = copies_and_waits(text)
    assert copies == 2 * (config.tiles_ahead + 1), "K and V, before the loop and in it"
    assert waits == [config.k_in_flight, config.v_in_flight, 0]
    assert config.buffers.slots == config.tiles_ahead + 1 == slots


@both
def test_one_slot_copies_strip_by_strip(arch: str) -> None:
    config, text = built(Case(40, 130, dim=64), arch, "lds")
    check_memory(config, text)
    strips = config.k.strips + config.v.strips
    assert copies_and_waits(text) == (strips, [0] * strips)


@both
def test_registers_take_no_copies(arch: str) -> None:
    config, text = built(Case(40, 130, dim=64), arch, "registers")
    check_memory(config, text)
    assert copies_and_waits(text) == (0, [])


@both
def test_decode_has_the_buffers_of_its_config(arch: str) -> None:
    config, text = built(Case(1, 700, heads=4, dim=64), arch)
    check_memory(config, text)
    if config.buffers.kind == "ring":
        assert copies_and_waits(text)[1] == [config.k_in_flight, config.v_in_flight, 0]
