"""Machine code for the tests of its reader: small compiled kernels, and kernels written by hand."""

from functools import cache

from tests.sim.amd import attention as amd_attention
from tests.sim.amd import kernels as kernels
from warpattn.sim import compile_for

ARCHS = {"gfx942": 4, "gfx950": 16}  # bytes that a lane copies to LDS at once

_KERNEL = """
    .globl hand
hand:
{body}
    s_endpgm
.Lfunc_end0:
    .amdhsa_kernel hand
    .end_amdhsa_kernel
; NumVgprs: 8
; NumAgprs: 0
; Occupancy: 8
    .amdgpu_metadata
    .max_flat_workgroup_size: {threads}
    .sgpr_count: 16
amdhsa.target: amdgcn-amd-amdhsa--{target}
    .end_amdgpu_metadata
"""


def by_hand(body: str, waves: int = 2, target: str = "gfx950") -> str:
    """The text of a kernel with these instructions."""
    return _KERNEL.format(body=body, threads=64 * waves, target=target)


@cache
def attention(arch: str, fault: str = "") -> str:
    """Machine code of the small attention kernel, FAULT as there."""
    constants = {"VERSION": 3 if arch == "gfx942" else 4, "FAULT": fault}
    types = {**dict.fromkeys("qkv", "*bf16"), "out": "*fp32", "n": "i32", "scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    return compile_for(arch, amd_attention.attention_kernel, types, constants, machine_code=True).asm["amdgcn"]


@cache
def ring(arch: str, fault: str = "") -> str:
    """Machine code of the ring of two slots."""
    constants = {"BYTES": ARCHS[arch], "FAULT": fault}
    types = {"x": "*fp32", "out": "*fp32", "n": "i32"} | dict.fromkeys(constants, "constexpr")
    return compile_for(arch, kernels.ring_kernel, types, constants, machine_code=True).asm["amdgcn"]
