"""Machine code of the CDNA kernels over 8-bit keys and values: conversions, loads, registers, order."""

from functools import cache
from itertools import product

import pytest

pytest.importorskip("triton")

from tests.drawn import drawn, each_once
from tests.sim.cdna.calls import ARCHS, E4M3, Case, in_eight_bits, paged
from tests.unit.kernels.test_cdna_code import Built, build, no_spills
from warpattn.machine_code.gcn import check_copies, check_loads
from warpattn.masks import Causal

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
