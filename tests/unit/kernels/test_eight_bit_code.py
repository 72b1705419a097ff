"""Machine code of kernels over 8-bit keys and values, on CDNA and Blackwell: conversions, loads, registers, order."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

pytest.importorskip("triton")

from tests.drawn import drawn, each_once
from tests.sim.cdna.calls import ARCHS, E4M3, Case, in_eight_bits, paged
from tests.unit.kernels.test_cdna_code import Built, build, no_spills
from tests.unit.kernels.test_sm100_code import COMPILER_BYTES, compile_prefill
from warpattn.kernels.sm100.config import SMEM_LIMIT, FA4Config
from warpattn.machine_code.gcn import check_copies, check_loads
from warpattn.machine_code.sass import opcode_counts, resources
from warpattn.masks import Causal
from warpattn.problem.element import BF16, FP8, FP16
from warpattn.problem.problem import Scales
from warpattn.problem.scales import EightBit

both = pytest.mark.parametrize("arch", ARCHS)
CONVERSIONS = {"gfx942": "v_cvt_pk_f32_fp8", "gfx950": "v_cvt_scalef32_pk_bf16_fp8"}  # two elements each
PER = ("head", "tensor")
TOKENS = ("token", "token")


@cache
def built(arch: str, tokens: int, per: tuple[str, str] = PER, dim: int = 128, page_size: int = 0) -> Built:
    """The kernel for 40 or 1 new tokens of four query heads on a key head."""
    case = Case(tokens, 4000, heads=8, heads_kv=2, dim=dim, mask=Causal())
    call = paged(case, [70, 3000], page_size) if page_size else case.call()
    return build(in_eight_bits(call, E4M3[arch], per), arch)


@both
@pytest.mark.parametrize("tokens", [1, 40])
def test_each_element_is_converted_once(arch, tokens):
    """By an instruction for two, before it is written to LDS; each wave of the workgroup has its part."""
    found = built(arch, tokens)
    config = found.config
    elements = config.block_n * (config.padded_qk + config.padded_v) // (64 * config.waves)
    assert found.summary.count(CONVERSIONS[arch]) == elements // 2
    assert found.summary.count("v_cvt_pk_f32_fp8", "v_cvt_f32_fp8", "v_cvt_scalef32") == elements // 2
    assert found.summary.copies == 0


@both
@pytest.mark.parametrize("tokens", [1, 40])
def test_loads_are_vectors(arch, tokens):
    """No load of keys or values is shorter than four bytes; rows of K take 16 bytes a lane."""
    found = built(arch, tokens).summary
    assert found.count("buffer_load_ubyte", "buffer_load_sbyte", "buffer_load_ushort", "buffer_load_short") == 0
    assert found.count("global_load_ubyte", "global_load_sbyte", "global_load_ushort", "global_load_short") == 0
    assert found.count("buffer_load_dwordx4") > 0


SHAPES = list(product((1, 40), (64, 128, 256), (0, 16), (PER, TOKENS)))


@pytest.mark.parametrize(("shape", "arch"), drawn(product(SHAPES, ARCHS), each_once(SHAPES[3::4], ARCHS)))
def test_nothing_spills_and_all_is_in_order(shape, arch):
    tokens, dim, page_size, per = shape
    found = built(arch, tokens, per, dim, page_size)
    assert no_spills(found)
    assert check_copies(found.text).proven
    assert not check_loads(found.text)


STORED = EightBit(FP8, Scales("head", "tensor"))
TWO = FA4Config(FP16, 128, 128, max_qk_stages=1, eight_bit=STORED)
BLACKWELL = {
    "d128": (TWO, "dense"),
    "d128-bf16": (replace(TWO, element=BF16), "dense"),
    "d64": (FA4Config(BF16, 64, 64, max_qk_stages=1, eight_bit=STORED).gluon()[0], "ragged"),
    "one-tile-paged": (replace(TWO, BM=128, page_size=64), "paged"),
}


# (bytes of stack, stores, loads) with Triton 3.9.0: the descriptor by which all loads and stores of global memory go,
# eight bytes. It is written when the kernel starts and read by each softmax role before its loop over key tiles, for
# the scale of the keys, and behind it, for that of the values and the LSE. Uniform registers are full, since the MMA
# warp fills 70 with descriptors of products; ptxas without --regAllocOptLevel=2, which Triton gives it, spills nothing.
SPILLED = {"d128": (8, 1, 4), "d128-bf16": (8, 1, 4)}


@cache
def compiled_for_blackwell(name: str):
    return compile_prefill(*BLACKWELL[name])


@pytest.mark.parametrize("name", drawn(BLACKWELL, ["d128", "one-tile-paged"]))
def test_registers_and_memory_of_blackwell(name):
    config, _ = BLACKWELL[name]
    used, metadata = resources(compiled_for_blackwell(name).asm["cubin"]), compiled_for_blackwell(name).metadata
    assert used.registers * config.topology.threads == 65_536
    assert (used.stack, used.spill_stores, used.spill_loads) == SPILLED.get(name, (0, 0, 0))
    assert config.smem_used <= metadata.shared <= min(SMEM_LIMIT, config.smem_used + COMPILER_BYTES)
    assert metadata.num_warps * 32 == config.topology.threads, "no warp more than without 8 bits"


def test_conversions_of_blackwell():
    """K and V before the loop, in it, or behind it: each byte converted once, two in an instruction."""
    code = compiled_for_blackwell("d128").asm["cubin"]
    config, _ = BLACKWELL["d128"]
    unpacked = sum(count for opcode, count in opcode_counts(code, modifiers=True).items() if "E4M3" in opcode)
    assert unpacked == 4 * config.BN * 128 // (64 * 2)
    assert opcode_counts(code)["UTMALDG"] == 2 * 128 // 64 + 4, "columns of two query tiles; 8-bit tiles whole"
