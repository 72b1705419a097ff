"""What the simulator of gfx942 and gfx950 takes for granted, looked up in the machine code that Triton makes."""

import re

import pytest

pytest.importorskip("triton")

from tests.sim.amd import attention
from tests.sim.amd import kernels as kernels
from warpattn.sim import compile_for

ARCHS = {"gfx942": 4, "gfx950": 16}
TYPES = {"x": "*fp32", "out": "*fp32", "n": "i32"}
_WORDS = {
    r"buffer_load.* lds|global_load_lds": "copy", r"ds_read": "read", r"ds_write": "write", r"s_barrier": "barrier",
    r"s_waitcnt vmcnt\(\d": "wait",
}  # fmt: skip
pytestmark = pytest.mark.parametrize("arch", ARCHS)


def words(arch: str, kernel, **constants) -> str:
    """The instructions that matter here, in order, repetitions as one."""
    constants = {**constants, "BYTES": ARCHS[arch]}
    types = TYPES | dict.fromkeys(constants, "constexpr")
    code = compile_for(arch, kernel, types, constants, machine_code=True).asm["amdgcn"]
    found = [word for line in code.splitlines() for word in [_word(line.strip())] if word]
    return " ".join(word for i, word in enumerate(found) if i == 0 or found[i - 1] != word)


def _word(line: str) -> str:
    return next((word for pattern, word in _WORDS.items() if re.match(pattern, line)), "")


@pytest.mark.parametrize("fault", ["", "relaxed"])
def test_the_compiler_puts_barriers_where_waves_meet(arch, fault):
    """After a wait and before the reads; after the reads and before the copy that overwrites."""
    assert "barrier copy wait barrier read" in words(arch, kernels.ring_kernel, FAULT=fault)


def test_a_wait_does_not_wait_for_what_is_in_no_group(arch):
    assert "wait barrier read" not in words(arch, kernels.ring_kernel, FAULT="no_commit")
    assert "wait barrier read" in words(arch, kernels.ring_kernel, FAULT="late_commit")


def test_only_other_writes_where_the_mask_is_off(arch):
    """A copy by pointers skips those lanes; one by buffer loads makes them zero by its bounds."""
    wrote = {op: "write" in words(arch, kernels.copy_kernel, OP=op) for op in ("pointers_mask", "buffer_mask")}
    assert wrote == {"pointers_mask": False, "buffer_mask": False}
    assert "write" in words(arch, kernels.copy_kernel, OP="pointers_other")


def test_attention_is_real_code(arch):
    """Matrix cores, copies to LDS with two groups under way, nothing in scratch memory."""
    constants = {"VERSION": 3 if arch == "gfx942" else 4, "FAULT": ""}
    types = {**dict.fromkeys("qkv", "*bf16"), "out": "*fp32", "n": "i32", "scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    code = compile_for(arch, attention.attention_kernel, types, constants, machine_code=True).asm["amdgcn"]
    shape = "16x16x16" if arch == "gfx942" else "16x16x32"
    assert len(re.findall(rf"v_mfma_f32_{shape}_?bf16", code)) >= 8
    assert re.search(r"buffer_load_dword.* lds", code) and re.search(r"vgpr_spill_count:\s+0\b", code)
