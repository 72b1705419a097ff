"""Machine code of kernels over 8-bit keys and values, on CDNA and Blackwell: conversions, loads, registers, order."""

import re
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

pytest.importorskip("triton")
from triton import compile as compile_source

from tests.drawn import drawn
from tests.sim.cdna.calls import ARCHS, E4M3, Case, in_eight_bits, paged
from tests.sim.cdna.test_mla_eight_bit import called as cdna_latents
from tests.sim.sm90.mla import Latent
from tests.sim.sm100.test_eight_bit import choice_of, steps, stored
from tests.sim.sm100.test_mla_eight_bit import prepared as latents
from tests.unit.kernels.test_cdna_code import Built, build
from tests.unit.kernels.test_sm100_code import COMPILER_BYTES, compile_prefill
from warpattn.kernels.sm100.config import SMEM_LIMIT, FA4Config
from warpattn.machine_code.gcn import check_copies, check_loads
from warpattn.machine_code.roles import role_faults
from warpattn.machine_code.sass import opcode_counts, resources
from warpattn.masks import Causal, Full, Mask
from warpattn.problem.arch import triton_target
from warpattn.problem.element import BF16, FP8, FP16
from warpattn.problem.problem import Scales
from warpattn.problem.scales import EightBit

kernels = pytest.mark.parametrize(("arch", "tokens"), drawn(product(ARCHS, (1, 40)), [("gfx950", 1)]))
CONVERSIONS = {"gfx942": "v_cvt_pk_f32_fp8", "gfx950": "v_cvt_scalef32_pk_bf16_fp8"}  # two elements each
PER = ("head", "tensor")
TOKENS = ("token", "token")
COLUMNS = (64, 64)
Per = tuple[str | int, str | int]
CAUSAL = Causal()


@cache
def built(arch: str, tokens: int, per: Per = PER, dim: int = 128, page_size: int = 0, mask: Mask = CAUSAL) -> Built:
    """The kernel for 40 or 1 new tokens of four query heads on a key head."""
    case = Case(tokens, 4000, heads=8, heads_kv=2, dim=dim, mask=mask)
    call = paged(case, [70, 3000], page_size) if page_size else case.call()
    return build(in_eight_bits(call, E4M3[arch], per), arch)


def unmasked(arch: str, tokens: int, per: Per = PER) -> Built:
    """The kernel without a mask: no tile is computed again, key by key, from bytes that are converted once more."""
    return built(arch, tokens, per, mask=Full())


@kernels
def test_each_element_is_converted_once(arch, tokens):
    """By an instruction for two, before it is written to LDS; each wave of the workgroup has its part."""
    found = unmasked(arch, tokens)
    config = found.config
    elements = config.block_n * (config.padded_qk + config.padded_v) // (64 * config.waves)
    assert found.summary.count(CONVERSIONS[arch]) == elements // 2
    assert found.summary.count("v_cvt_pk_f32_fp8", "v_cvt_f32_fp8", "v_cvt_scalef32") == elements // 2
    assert found.summary.copies == 0


@kernels
def test_loads_are_vectors(arch, tokens):
    """No load of keys or values is shorter than four bytes; rows of K take 16 bytes a lane."""
    found = built(arch, tokens).summary
    assert found.count("buffer_load_ubyte", "buffer_load_sbyte", "buffer_load_ushort", "buffer_load_short") == 0
    assert found.count("global_load_ubyte", "global_load_sbyte", "global_load_ushort", "global_load_short") == 0
    assert found.count("buffer_load_dwordx4") > 0


@kernels
def test_scales_of_columns_are_few_instructions(arch, tokens):
    """A lane loads a scale of a key for each block, and of a value's row; elements are converted as often as with one
    scale, two in an instruction."""
    plain, blocks = unmasked(arch, tokens), unmasked(arch, tokens, COLUMNS)
    config = blocks.config
    assert (config.key_blocks, config.v.scales, config.k.strip) == (2, 2, 64)
    elements = config.block_n * (config.padded_qk + config.padded_v) // (64 * config.waves)
    converting = ("v_cvt_pk_f32_fp8", "v_cvt_f32_fp8", "v_cvt_scalef32")
    assert blocks.summary.count(*converting) == plain.summary.count(*converting) == elements // 2


SHAPES = list(product((1, 40), (64, 128, 256), (0, 16), (PER, TOKENS)))
SHAPES += list(product((1, 40), (128, 256), (0, 16), (COLUMNS,)))
# Scalars in lanes of a vector register: arguments that only the end or attending again needs, written before the loop
# over key tiles and read behind it. Pages, scales of both and 106 scalar registers leave none for them.
IN_LANES = {((1, 256, 16, COLUMNS), "gfx942"): 16}


@pytest.mark.parametrize(("shape", "arch"), drawn(product(SHAPES, ARCHS), [(SHAPES[3], "gfx942")]))
def test_nothing_spills_and_all_is_in_order(shape, arch):
    tokens, dim, page_size, per = shape
    found = built(arch, tokens, per, dim, page_size)
    assert (found.summary.vgpr_spills, found.summary.scratch) == (0, 0)
    assert found.summary.sgpr_spills <= IN_LANES.get((shape, arch), 0)
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


@cache
def compiled_for_blackwell(config: FA4Config, kind: str, chip: str = "sm100"):
    return compile_prefill(config, kind, chip)


@pytest.mark.parametrize("name", drawn(BLACKWELL, ["d128"]))
def test_registers_and_memory_of_blackwell(name):
    config, _ = BLACKWELL[name]
    kernel = compiled_for_blackwell(*BLACKWELL[name])
    used, metadata = resources(kernel.asm["cubin"]), kernel.metadata
    assert used.registers * config.topology.threads == 65_536
    assert (used.stack, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert config.smem_used <= metadata.shared <= min(SMEM_LIMIT, config.smem_used + COMPILER_BYTES)
    assert metadata.num_warps * 32 == config.topology.threads, "no warp more than without 8 bits"


# Places of the kernel that request the scales of a tile of keys, and of values: the first ones, and behind each tile.
SCALES_REQUESTED = {"two-tiles": (3, 3), "decode": (4, 3)}
# Words spilled with Triton 3.9.0, written once and read where a role begins, in no loop over key tiles; the second one
# of decode, 16 times the thread's number, came with parts that keep maximum and sum apart.
SPILLED_BESIDE_SCALES = {"two-tiles": 1, "decode": 2}
OF_TOKENS = list(product(("two-tiles", "decode"), (TOKENS, COLUMNS)))


@pytest.mark.full
@pytest.mark.parametrize(("name", "per"), drawn(OF_TOKENS, [("decode", TOKENS)]))
def test_scales_of_tokens_on_blackwell(name, per):
    """Copied by the two warps that convert, two keys a lane; no role waits in vain, and hardly a word is spilled."""
    call = stored(name, per=per)
    choice = choice_of(call, two=name == "two-tiles")
    launch = steps(call, choice)[0][0]
    kernel = compile_source(launch.source(), target=triton_target("sm100"), options=dict(launch.options))
    used, config = resources(kernel.asm["cubin"]), choice.config
    of_keys, of_values = SCALES_REQUESTED[name]
    copies = 2 * (of_keys * config.scale_blocks("k") + of_values * config.scale_blocks("v"))
    assert opcode_counts(kernel.asm["cubin"])["LDGSTS"] == copies
    assert used.stack <= 8 and used.spill_stores <= SPILLED_BESIDE_SCALES[name]
    assert role_faults(kernel.asm) == []
    assert config.smem_used <= kernel.metadata.shared <= min(SMEM_LIMIT, config.smem_used + COMPILER_BYTES)


@pytest.mark.full
def test_latents_on_blackwell():
    """The products of 16 bits; scales are copied by the two warps that convert, and nothing is spilled."""
    (launch,) = latents(Latent((200,), page=64)).steps
    kernel = compile_source(launch.source(), target=triton_target("sm100"), options=dict(launch.options))
    used, counts, config = resources(kernel.asm["cubin"]), opcode_counts(kernel.asm["cubin"]), launch.key[0]
    assert role_faults(kernel.asm) == []
    assert (used.stack, used.spills) == (0, 0)
    assert counts["UTCHMMA"] == 2 * config.dim_qk // 16 + 2 * config.BN // 16, "Q·K before the loop and in it; P·V"
    assert counts["UTMALDG"] > 0 and counts["LDGSTS"] > 0
    assert config.smem_used <= kernel.metadata.shared <= min(SMEM_LIMIT, config.smem_used + COMPILER_BYTES)


LATENTS_ON_CDNA = list(product((16, 128), ARCHS))


@pytest.mark.full
@pytest.mark.parametrize(("heads", "arch"), drawn(LATENTS_ON_CDNA, [(128, "gfx950")]))
def test_latents_on_cdna(heads, arch):
    """Nothing goes to memory; addresses of three tensors and their scales are more than scalar registers, and spill to
    lanes of a vector register on gfx942."""
    found = build(cdna_latents(Latent((330, 40), page=64, heads=heads), arch), arch)
    spills = found.summary.vgpr_spills, found.summary.scratch
    assert spills == (0, 0)
    assert found.summary.sgpr_spills <= (100 if arch == "gfx942" else 0)
    assert check_copies(found.text).proven and not check_loads(found.text)
    assert found.summary.lds - found.config.lds_bytes <= 8192


BYTES = EightBit(FP8, Scales("head", "tensor", "head"), queries=True)
OF_BYTES = FA4Config(FP8, 128, 128, eight_bit=BYTES, out_element=BF16)
PRODUCTS = {
    "d128": (OF_BYTES, "dense"),
    "d128-grouped": (replace(OF_BYTES, group=4, out_element=FP16), "ragged"),
    "d64": (replace(OF_BYTES, qk_depth=64, ov_depth=64).gluon()[0], "dense"),
    "one-tile-paged": (replace(OF_BYTES, BM=128, page_size=64), "paged"),
    "one-tile-split": (replace(OF_BYTES, BM=128, splitk_partitions=4), "dense"),
    "d128-64-rows": (replace(OF_BYTES, eight_bit=EightBit(FP8, Scales("64 rows", "head", "64 rows"), True)), "dense"),
}


# (bytes of stack, stores, loads) with Triton 3.9.0: the thread's number, 16 times it, and seq_k - seq_q, which ptxas
# makes once for all roles and reads again where one of them begins and behind its loop over key tiles.
SPILLED_BESIDE_PRODUCTS = {"one-tile-split": (8, 2, 12)}


@pytest.mark.parametrize("name", drawn(PRODUCTS, ["d128"]))
def test_products_of_blackwell(name):
    """Products of 32 columns deep, half as many as of 16 bits; conversions of weights, two an instruction."""
    config, kind = PRODUCTS[name]
    kernel = compiled_for_blackwell(config, kind)
    used, counts = resources(kernel.asm["cubin"]), opcode_counts(kernel.asm["cubin"])
    qk, pv = config.padded_qk_depth // 32, config.BN // 32
    assert counts["UTCQMMA"] == 4 * qk + (4 if config.num_q == 2 else 2) * pv
    assert counts["UTCHMMA"] == 0
    written = opcode_counts(kernel.asm["cubin"], modifiers=True)
    packed = sum(count for opcode, count in written.items() if "E4M3" in opcode and "UNPACK" not in opcode)
    again = config.ov_depth // 8  # of what attends once more to tiles that met hidden values
    assert packed == 2 * config.BN // 2 + again
    assert used.registers * config.topology.threads == 65_536
    assert (used.stack, used.spill_stores, used.spill_loads) == SPILLED_BESIDE_PRODUCTS.get(name, (0, 0, 0))
    assert config.smem_used <= kernel.metadata.shared <= min(SMEM_LIMIT, config.smem_used + COMPILER_BYTES)


def test_values_of_products_are_read_as_they_are():
    """Their keys are not neighbours in shared memory: the instruction transposes (bit 16 of its descriptor)."""
    code = compiled_for_blackwell(*PRODUCTS["d128"]).asm["ptx"]
    found = re.findall(r"kind::f8f6f4 \[[^]]*\], (\[[^]]*\]|%rd\d+), %rd\d+, (%r\d+)", code)
    transposed = {left.startswith("["): set() for left, _ in found}
    for left, descriptor in found:
        (bits,) = re.findall(rf"mov\.b32 \t{descriptor}, (-?\d+);", code)
        transposed[left.startswith("[")].add(int(bits) >> 16 & 1)
    assert transposed == {True: {1}, False: {0}}, "weights are in tensor memory, queries in shared memory"


@pytest.mark.full
@pytest.mark.parametrize("name", PRODUCTS)
def test_b300_gets_the_same_products(name):
    """Of the same intermediate code; the assembler spills less for sm_103."""
    b200, b300 = (compiled_for_blackwell(*PRODUCTS[name], chip).asm for chip in ("sm100", "sm103"))
    code = [re.sub(r'loc\("[^"]*/', 'loc("', made["ttgir"]) for made in (b300, b200)]  # without folders
    assert code[0].replace('"cuda:103"', '"cuda:100"') == code[1]
    assert ".target sm_103a" in b300["ptx"] and resources(b300["cubin"]).spills <= resources(b200["cubin"]).spills
    assert opcode_counts(b300["cubin"])["UTCQMMA"] == opcode_counts(b200["cubin"])["UTCQMMA"]


def test_conversions_of_blackwell():
    """K and V before the loop, in it, or behind it: each byte converted once, two in an instruction."""
    config, kind = BLACKWELL["d128"]
    code = compiled_for_blackwell(config, kind).asm["cubin"]
    unpacked = sum(count for opcode, count in opcode_counts(code, modifiers=True).items() if "E4M3" in opcode)
    assert unpacked == 4 * config.BN * 128 // (64 * 2)
    assert opcode_counts(code)["UTMALDG"] == 2 * 128 // 64 + 4, "columns of two query tiles; 8-bit tiles whole"
