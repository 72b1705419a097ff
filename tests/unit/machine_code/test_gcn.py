"""AMD machine code is read right: registers, spills, LDS, occupancy and instruction counts."""

import pytest

pytest.importorskip("triton")

import triton.language as tl
from triton import jit

from tests.unit.machine_code.gcn_builds import ARCHS, attention, by_hand
from warpattn.machine_code import gcn
from warpattn.machine_code.gcn.summary import wait_of
from warpattn.sim import compile_for


@jit
def _rows(x, y, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * 64 + tl.arange(0, 64)[None, :]
    values = tl.load(x + at)  # [ROWS, 64], four neighbours at once
    largest = tl.max(values, axis=0)  # keeps every value alive until all are there
    tl.store(y + at, tl.exp2(values - largest[None, :]))


def rows(size: int) -> str:
    types = {"x": "*fp32", "y": "*fp32", "ROWS": "constexpr"}
    return compile_for("gfx942", _rows, types, {"ROWS": size}, num_warps=1, machine_code=True).asm["amdgcn"]


def test_instructions_of_a_known_kernel():
    found = gcn.summary(rows(8))
    assert found.target == "gfx942" and found.waves == 1
    assert found.count("v_exp_f32") == 8
    assert found.counts["buffer_load_dwordx4"] == found.counts["buffer_store_dwordx4"] == 2
    assert found.count("buffer", "global") == 4
    assert 8 <= found.vgprs <= 64 and found.occupancy == 8
    assert (found.vgpr_spills, found.sgpr_spills, found.scratch, found.lds) == (0, 0, 0, 0)


def test_spills_are_seen():
    found = gcn.summary(rows(512))
    assert found.vgprs + found.agprs == 512 and found.occupancy == 1
    assert found.vgpr_spills > 0
    assert found.scratch >= 4 * found.vgpr_spills
    assert found.count("scratch_store") > 0 and found.count("scratch_load") > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_attention(arch):
    """4 waves × 16 rows, keys by 32, D 64: two groups of copies under way, so the wait leaves one group."""
    found = gcn.summary(attention(arch), lds=16_384)
    group = 2 * (32 * 64 * 2) // (256 * ARCHS[arch])  # instructions of a wave for K and V
    assert found.copies == 2 * group
    assert found.waits[group] == 1 and set(found.waits) == {0, group}
    assert found.count("v_mfma") == (16 if arch == "gfx942" else 8)
    assert found.count("ds_read_b64_tr") == (0 if arch == "gfx942" else 8)
    assert found.counts["s_barrier"] == 3 and found.waves == 4
    assert found.vgpr_spills == found.scratch == 0
    assert found.occupancy == (4 if arch == "gfx942" else 8), "LDS holds 4 workgroups of one wave a SIMD, or 10"


def test_rows_for_the_command_line():
    told = dict(gcn.rows(attention("gfx950"), lds=16_384))
    assert told["v_mfma  matrix products"] == "8" and told["LDS, bytes a workgroup"] == "16,384"
    assert told["s_waitcnt  waits for memory"] == "vmcnt(0) × 2, vmcnt(2) × 1"
    assert all(how_much not in ("", "0") or "spill" in what for what, how_much in told.items() if "scratch" not in what)
    every = dict(gcn.rows(attention("gfx950"), every=True))
    assert every["v_mfma_f32_16x16x32_bf16"] == "8" and "s_endpgm" in every


def test_places_are_those_of_the_source():
    copies = [i for i in gcn.read(attention("gfx950")).instructions if i.to_lds]
    assert {copy.place.split(" from ")[0] for copy in copies} == {"attention.py:21", "attention.py:22"}
    assert len({copy.place for copy in copies}) == 4, "from two places each"


def test_an_instruction_in_parts():
    body = "    buffer_load_dwordx4 v[2:5], v19, s[20:23], 0 offen offset:64 ; 16-byte Folded Reload"
    (instruction, _) = gcn.read(by_hand(body)).instructions
    assert (instruction.name, instruction.operands) == ("buffer_load_dwordx4", ("v[2:5]", "v19", "s[20:23]", "0"))
    assert instruction.number("offset") == 64 and not instruction.to_lds


def test_blocks_end_at_branches_and_begin_at_labels():
    code = gcn.read(by_hand(".LBB0_1:\n s_nop 0\n s_cbranch_scc1 .LBB0_1\n s_branch .LBB0_3\n.LBB0_3:"))
    assert [(b.first, b.last, b.following) for b in code.blocks] == [(0, 2, (0, 1)), (2, 3, (2,)), (3, 4, ())]
    with pytest.raises(ValueError, match=r"branches to \.LBB9, which is no label"):
        gcn.read(by_hand(" s_branch .LBB9"))


@pytest.mark.parametrize(
    ("operand", "vm", "lgkm"),
    [("vmcnt(12)", 12, None), ("vmcnt(3) lgkmcnt(1)", 3, 1), ("lgkmcnt(0)", None, 0), ("0", 0, 0), ("0xc07f", None, 0),
     ("0x4f70", 16, None), ("expcnt(0)", None, None)],
)  # fmt: skip
def test_waits(operand, vm, lgkm):
    wait = gcn.read(by_hand(f" s_waitcnt {operand}")).instructions[0]
    assert (wait_of(wait, "vmcnt"), wait_of(wait, "lgkmcnt")) == (vm, lgkm)


@pytest.mark.parametrize("read", [gcn.read, gcn.summary, gcn.check_copies])
def test_what_is_no_machine_code_is_refused(read):
    with pytest.raises(ValueError, match="text of 4 characters holds no AMD kernel"):
        read("none")
