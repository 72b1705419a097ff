"""Machine code is read right: on a kernel whose registers and instructions are known beforehand."""

import pytest

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from warpattn.machine_code import sass  # noqa: E402


@triton.jit
def _rows(x, y, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + at)  # [ROWS, 128], one column per thread
    largest = tl.max(values, axis=0)  # keeps every value alive until all are there
    tl.store(y + at, tl.exp2(values - largest[None, :]))


def _compile(rows: int, **options) -> bytes:
    source = ASTSource(_rows, {"x": "*fp32", "y": "*fp32", "ROWS": "constexpr"}, {"ROWS": rows})
    options = {"num_warps": 4, "enable_fp_fusion": True, **options}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


@pytest.fixture(scope="module")
def small() -> bytes:
    return _compile(8)


def test_counts_instructions_by_name(small):
    counts = sass.opcode_counts(small)
    assert counts["LDG"] == 8
    assert counts["STG"] == 8
    assert counts["MUFU"] == 8
    assert counts["EXIT"] >= 1


def test_modifiers_keep_the_full_spelling(small):
    counts = sass.opcode_counts(small, modifiers=True)
    assert counts["MUFU.EX2"] == 8
    assert sum(counts.values()) == sum(sass.opcode_counts(small).values())


def test_resources_without_spills(small):
    found = sass.resources(small)
    assert 8 <= found.registers <= 64
    assert (found.stack, found.local, found.shared, found.spills) == (0, 0, 0, 0)


def test_spills_are_seen():
    found = sass.resources(_compile(128, maxnreg=32))
    assert found.registers <= 32
    assert found.stack > 0
    assert found.spill_stores > 0
    assert found.spill_loads > 0


@pytest.mark.parametrize("read", [sass.resources, sass.opcode_counts])
def test_what_is_not_a_cubin_is_refused(read):
    with pytest.raises(ValueError, match="cubin of 4 bytes cannot be read"):
        read(b"none")
