"""The check of copies to LDS: compiled kernels pass, and each wait and barrier that matters is missed when it goes."""

import re
from functools import cache

import pytest

pytest.importorskip("triton")

from docs.figures.timelines import cdna
from tests.drawn import drawn
from tests.unit.machine_code.gcn_builds import ARCHS, attention, by_hand, ring
from warpattn.machine_code.gcn import check_copies, copies

KERNELS = {"attention": attention, "ring": ring}
every_build = pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch in ARCHS for name in KERNELS])


def kinds(text: str) -> set[str]:
    """What is wrong; everything must have been explored."""
    found = check_copies(text)
    assert found.complete
    return {finding.kind for finding in found.findings}


def lines(text: str, pattern: str) -> list[int]:
    return [i for i, line in enumerate(text.splitlines()) if re.match(rf"\s+{pattern}", line)]


def changed(text: str, index: int, line: str) -> str:
    whole = text.splitlines()
    assert whole[index] != line
    return "\n".join([*whole[:index], line, *whole[index + 1 :]])


def looser(text: str, index: int) -> str:
    """The wait in a line waits for one operation less."""
    line = text.splitlines()[index]
    return changed(text, index, re.sub(r"vmcnt\((\d+)\)", lambda n: f"vmcnt({int(n.group(1)) + 1})", line))


@every_build
def test_compiled_kernels_are_right(arch, name):
    text = KERNELS[name](arch)
    found = check_copies(text)
    assert found.proven, found.findings
    assert found.copies == len(lines(text, r"buffer_load\w* .* lds")) > 0


@every_build
def test_a_wait_loosened_by_one_is_found(arch, name):
    """All that leave something under way; vmcnt(0) stands where only registers or the end are waited for."""
    text = KERNELS[name](arch)
    waits = lines(text, r"s_waitcnt vmcnt\([1-9]")
    assert waits
    for wait in waits:
        assert kinds(looser(text, wait)) == {"not awaited"}, text.splitlines()[wait]


@cache
def prefill(kind: str, arch: str) -> str:
    """Machine code of the shipped kernel with one kind of buffers."""
    return cdna.compiled(cdna.step_of(kind, arch)).asm["amdgcn"]


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx950"]))
@pytest.mark.parametrize(("kind", "pattern"), [("lds", r"s_waitcnt vmcnt\(0\)"), ("ring", r"s_waitcnt vmcnt\([1-9]")])
def test_the_shipped_prefill(arch, kind, pattern):
    """Right as it is; with one slot, one of the waits is for Q alone, with two the vmcnt(0) are for Q and the end, when
    nothing reads any more."""
    text = prefill(kind, arch)
    assert check_copies(text).proven
    found = [kinds(looser(text, wait)) - {"at the end"} for wait in lines(text, pattern)]
    assert sorted(map(sorted, found)) == {"lds": [[], *[["not awaited"]] * 6], "ring": [["not awaited"]] * 2}[kind]


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx950"]))
def test_barriers_of_the_shipped_prefill(arch):
    """With two slots one barrier makes V visible, another K and ends the reads of the slots that are filled next."""
    text = prefill("ring", arch)
    found = [kinds(changed(text, barrier, "")) for barrier in lines(text, "s_barrier")]
    assert sorted(map(sorted, found)) == [[], ["no barrier"], ["no barrier", "overwritten"]]


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx950"]))
def test_stores_to_lds_of_the_shipped_prefill(arch):
    """Through registers: every barrier in the loop orders the stores of a strip and the reads of another wave."""
    text = prefill("registers", arch)
    found = check_copies(text)
    assert found.proven and found.copies == 0 and found.states > 10
    missing = [kinds(changed(text, barrier, "")) for barrier in lines(text, "s_barrier")]
    assert missing and all(kind == {"unordered"} for kind in missing)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_missing_barrier_is_found(arch):
    """Before the copies, after the wait; the last one orders nothing any more, no copy and no read follow it."""
    text = attention(arch)
    before, after, last = lines(text, "s_barrier")
    assert kinds(changed(text, before, "")) == {"overwritten"}
    assert kinds(changed(text, after, "")) == {"no barrier"}
    assert kinds(changed(text, last, "")) == set()


def test_waves_that_read_what_they_copied_need_no_barrier():
    """On gfx950 a wave of the ring reads its own rows only; on gfx942 it does not."""
    for arch, needed in (("gfx950", set()), ("gfx942", {"no barrier", "overwritten"})):
        text = ring(arch)
        missed = set().union(*(kinds(changed(text, barrier, "")) for barrier in lines(text, "s_barrier")))
        assert missed == needed, arch


def test_a_missing_wait_for_reads_is_found():
    text = ring("gfx942")
    found = [kinds(changed(text, wait, "")) for wait in lines(text, r"s_waitcnt lgkmcnt\(0\)")[1:3]]
    assert found == [{"overwritten"}] * 2


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("fault", ["loose_wait", "wrong_slot", "late_fetch"])
def test_faults_in_the_source(arch, fault):
    """The same ones that the simulator reports."""
    assert kinds(attention(arch, fault)) == {"not awaited"}


def test_findings_name_lines():
    text = attention("gfx950")
    text = looser(text, lines(text, r"s_waitcnt vmcnt\(2\)")[0])
    finding = check_copies(text).findings[0]
    assert text.splitlines()[finding.copy.line - 1].strip().startswith("buffer_load_dwordx4 v19")
    assert "attention.py:22 from attention.py:46" in str(finding)
    assert "no s_waitcnt vmcnt covers it; ds_read_b64_tr_b16 in line" in str(finding)


LANE_ADDRESS = "v_and_b32_e32 v1, 0x3ff, v0\n v_lshlrev_b32_e32 v1, 4, v1\n s_mov_b32 m0, 0\n"
COPY = "buffer_load_dwordx4 v5, s[0:3], 0 offen lds\n"
READ = "ds_read_b128 v[8:11], v1 offset:1024\n"
ALL_SEEN = "s_waitcnt vmcnt(0)\n s_barrier\n"
END = "s_waitcnt vmcnt(0)\n"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (COPY + ALL_SEEN + READ, set()),
        (COPY + READ, {"not awaited"}),
        (COPY + "s_waitcnt vmcnt(0)\n" + READ, {"no barrier"}),
        (COPY + "s_barrier\n s_waitcnt vmcnt(0)\n" + READ, {"no barrier"}),
        # Stores count, in order; operations that are not known to be in order do not.
        (COPY + "buffer_store_dword v5, v6, s[0:3], 0 offen\n s_waitcnt vmcnt(1)\n s_barrier\n" + READ, set()),
        (COPY + "s_waitcnt vmcnt(1)\n s_barrier\n" + READ, {"not awaited"}),
        (COPY + "flat_load_dword v6, v[2:3]\n s_waitcnt vmcnt(1)\n s_barrier\n" + READ, {"not awaited"}),
        # One way round the wait is enough.
        ("s_cmp_eq_u32 s9, 0\n" + COPY + "s_cbranch_scc1 .LBB0_1\n" + ALL_SEEN + ".LBB0_1:\n" + READ, {"not awaited"}),
        # Reads of other bytes are none of the copy's business.
        (COPY + "ds_read_b128 v[8:11], v1 offset:2048\n", set()),
        (COPY + "ds_read2st64_b32 v[8:9], v1 offset1:8\n", {"not awaited"}),
        (COPY + "ds_read2st64_b32 v[8:9], v1 offset0:8 offset1:16\n", set()),
        # Writes meet copies as well; what touches no memory does not.
        (COPY + "ds_write_b64 v1, v[8:9]\n", {"not awaited"}),
        (COPY + "ds_bpermute_b32 v8, v1, v9\n", set()),
        # Wave 1 reads what wave 0 writes; what a wave wrote itself is in order.
        ("ds_write_b128 v1, v[8:11] offset:2048\n" + READ, {"unordered"}),
        ("ds_write_b128 v1, v[8:11] offset:2048\n s_waitcnt lgkmcnt(0)\n s_barrier\n" + READ, set()),
        ("ds_write_b128 v1, v[8:11] offset:2048\n s_barrier\n" + READ, {"unordered"}),
        (READ + "ds_write_b128 v1, v[8:11] offset:2048\n", {"unordered"}),
        (READ + "ds_write_b128 v1, v[8:11] offset:1024\n", set()),
        (READ + "ds_read_b128 v[8:11], v1 offset:2048\n", set()),
        # A copy over what may still be read.
        (READ + "s_barrier\n" + COPY, {"overwritten"}),
        (READ + "s_waitcnt lgkmcnt(0)\n" + COPY, {"overwritten"}),
        (READ + "s_waitcnt lgkmcnt(0)\n s_barrier\n" + COPY, set()),
        (READ + "ds_bpermute_b32 v8, v1, v9\n s_waitcnt lgkmcnt(1)\n s_barrier\n" + COPY, set()),
        # By pointers, with an offset: to bytes 1024 to 3072, or to 3072 to 3328 and 4096 to 4352.
        ("global_load_lds_dwordx4 v[2:3], off offset:1024\n" + READ, {"not awaited"}),
        ("global_load_lds_dword v[2:3], off offset:3072\n" + READ, set()),
        # Addresses that cannot be known.
        ("v_mov_b32_e32 v1, v7\n" + COPY + READ, {"unresolved"}),
        ("v_mov_b32_e32 v1, v7\n" + COPY + ALL_SEEN + READ, set()),
        ("s_mov_b32 m0, s9\n" + COPY + READ, {"unresolved"}),
        # Addresses chosen lane by lane: by the number of the lane, by whether the lane is at work.
        ("v_cmp_gt_u32_e32 vcc, 0x400, v1\n v_cndmask_b32_e32 v1, v1, v1, vcc\n" + COPY + READ, {"not awaited"}),
        ("v_mov_b32_e32 v3, 0\n v_lshrrev_b64 v[4:5], v3, exec\n v_and_b32_e32 v4, 1, v4\n v_mov_b32_e32 v6, 0x8000\n"
         "v_cmp_eq_u32_e32 vcc, 1, v4\n v_cndmask_b32_e32 v1, v1, v6, vcc\n" + COPY + READ, set()),
        ("s_and_saveexec_b64 s[4:5], vcc\n v_mov_b32_e32 v1, 0\n s_or_b64 exec, exec, s[4:5]\n" + COPY + READ,
         {"unresolved"}),
        ("s_and_saveexec_b64 s[4:5], vcc\n s_or_b64 exec, exec, s[4:5]\n v_add_u32_e32 v1, 0x2000, v1\n" + COPY + READ,
         set()),
    ],
)  # fmt: skip
def test_by_hand(body, found):
    """Two waves copy a kilobyte each to 0 and 1024, and read one each from 1024 and 2048."""
    assert kinds(by_hand(LANE_ADDRESS + " v_readfirstlane_b32 s8, v1\n s_mov_b32 m0, s8\n" + body + END)) == found


# Two slots of 1 KiB by the lowest bit of an unknown counter; the copy under way is to the other one.
SLOTS = """
    s_load_dword s4, s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 4, v0
.LBB0_1:
    s_lshl_b32 s5, s4, 10
    s_and_b32 s5, s5, 0x400
    s_mov_b32 m0, s5
    s_barrier
    buffer_load_dwordx4 v5, s[0:3], 0 offen lds
    s_waitcnt vmcnt(1)
    s_barrier
    s_xor_b32 s6, s5, {other}
    v_add_u32_e32 v2, s6, v1
    ds_read_b128 v[8:11], v2
    s_waitcnt lgkmcnt(0)
    s_add_i32 s4, s4, 1
    s_cmp_lt_i32 s4, s7
    s_cbranch_scc1 .LBB0_1
"""


@pytest.mark.parametrize(("other", "found"), [("0x400", set()), ("0", {"not awaited"})])
def test_slots_of_a_counter_that_starts_anywhere(other, found):
    assert kinds(by_hand(SLOTS.format(other=other) + END, waves=1)) == found


# Three slots; the counter is compared and set back, and kept in a lane of a vector register.
THREE = """
    v_lshlrev_b32_e32 v1, 4, v0
    s_mov_b32 s4, 0
    v_writelane_b32 v3, s4, 5
.LBB0_1:
    v_readlane_b32 s4, v3, 5
    s_lshl_b32 s5, s4, 10
    s_mov_b32 m0, s5
    s_barrier
    buffer_load_dwordx4 v5, s[0:3], 0 offen lds
    s_waitcnt vmcnt({wait})
    s_barrier
    s_add_i32 s4, s4, 1
    s_cmp_eq_u32 s4, 3
    s_cselect_b32 s4, 0, s4
    v_lshl_add_u32 v2, s4, 10, v1
    ds_read_b128 v[8:11], v2
    s_waitcnt lgkmcnt(0)
    v_writelane_b32 v3, s4, 5
    s_cmp_lt_i32 s8, s7
    s_cbranch_scc1 .LBB0_1
"""


@pytest.mark.parametrize(("wait", "found"), [(2, set()), (3, {"not awaited"})])
def test_a_ring_of_three(wait, found):
    assert kinds(by_hand(THREE.format(wait=wait) + END, waves=1)) == found


def test_slots_of_a_signed_counter():
    """i % 2 by shifts of the sign, as the compiler makes it when it does not know that i is positive."""
    signed = "s_lshr_b32 s8, s4, 31\n s_add_i32 s8, s4, s8\n s_and_b32 s8, s8, -2\n s_sub_i32 s5, s4, s8\n"
    text = SLOTS.replace("s_load_dword s4, s[0:1], 0x0", "s_mov_b32 s4, 0")
    text = text.replace("s_lshl_b32 s5, s4, 10\n", f"{signed} s_lshl_b32 s5, s5, 10\n")
    assert "s_sub_i32" in text
    assert kinds(by_hand(text.format(other="0x400") + END, waves=1)) == set()
    assert kinds(by_hand(text.format(other="0") + END, waves=1)) == {"not awaited"}


# The address in v2 is known on one of two ways; a flag says on which, and the copy and the read follow.
FLAG = """
    s_mov_b64 s[4:5], {unknown}
    v_mov_b32_e32 v2, v7
    s_cmp_lt_i32 s9, s10
    s_cbranch_scc1 .LBB0_1
    s_mov_b64 s[4:5], {known}
    v_mov_b32_e32 v2, v1
.LBB0_1:
    {change}
    {branch} .LBB0_2
    buffer_load_dwordx4 v5, s[0:3], 0 offen lds
    ds_read_b128 v[8:11], v2 offset:{offset}
.LBB0_2:
"""
BY_SCC = "s_and_b64 s[4:5], s[4:5], exec\n s_cselect_b32 s6, 1, 0\n s_cmp_lg_u32 s6, 1\n s_cbranch_scc1"
BY_VCC = "s_and_b64 vcc, exec, s[4:5]\n s_cbranch_vccz"


def flagged(unknown="0", known="-1", branch=BY_SCC, change="s_nop 0", offset=2048) -> set[str]:
    body = FLAG.format(unknown=unknown, known=known, branch=branch, change=change, offset=offset)
    return kinds(by_hand(LANE_ADDRESS + body + END))


@pytest.mark.parametrize("branch", [BY_SCC, BY_VCC])
def test_a_flag_of_constants_decides_a_branch(branch):
    """The way that cannot be taken has no finding; the other one has all of them."""
    assert flagged(branch=branch) == set()
    assert flagged(branch=branch, offset=0) == {"not awaited"}
    assert flagged("-1", "0", branch.replace("scc1", "scc0").replace("vccz", "vccnz")) == set()


@pytest.mark.parametrize(
    "changes",
    [
        {"unknown": "-1", "known": "0"},  # the way with the unknown address
        {"unknown": "-1"},  # both ways
        {"branch": BY_VCC.replace("vccz", "vccnz")},
        {"unknown": "s[12:13]"},
        {"change": "s_load_dwordx2 s[4:5], s[0:1], 0x0"},
        {"change": "v_cmp_eq_u32_e64 s[4:5], v7, v1"},
        {"change": "v_subbrev_co_u32_e64 v3, s[4:5], 0, v3, vcc"},
        {"change": "s_cbranch_scc0 .LBB0_3\n s_mov_b64 s[4:5], -1\n.LBB0_3:"},
        {"change": "s_and_saveexec_b64 s[12:13], vcc"},  # -1 & EXEC may be 0
        {"branch": BY_VCC, "change": "s_mov_b32 s4, 0\n s_mov_b32 exec_hi, s9"},  # so may its upper half
        {"branch": "s_bitcmp1_b32 s9, 0\n s_cbranch_scc0"},  # says nothing of the ways
    ],
)
def test_a_flag_that_may_be_anything_decides_nothing(changes):
    assert flagged(**changes) == {"unresolved"}


# A flag that each round sets, with the address.
FIRST_ROUND = """
    s_mov_b64 s[4:5], {flag}
    v_mov_b32_e32 v2, v7
.LBB0_1:
    s_and_b64 vcc, exec, s[4:5]
    s_cbranch_vccz .LBB0_2
    buffer_load_dwordx4 v5, s[0:3], 0 offen lds
    ds_read_b128 v[8:11], v2 offset:2048
    s_waitcnt vmcnt(0) lgkmcnt(0)
    s_barrier
.LBB0_2:
    s_mov_b64 s[4:5], -1
    v_mov_b32_e32 v2, v1
    s_cmp_lt_i32 s9, s10
    s_cbranch_scc1 .LBB0_1
"""


@pytest.mark.parametrize(("flag", "found"), [("0", set()), ("-1", {"unresolved"})])
def test_a_flag_of_the_first_round(flag, found):
    assert kinds(by_hand(LANE_ADDRESS + FIRST_ROUND.format(flag=flag) + END)) == found


def test_a_counter_is_no_flag():
    """Its values are not tried one after the other, even though the branch depends on them alone."""
    count = "s_mov_b32 s4, 0\n.LBB0_1:\n s_add_i32 s4, s4, 1\n s_cmp_lg_u32 s4, 0x100000\n s_cbranch_scc1 .LBB0_1\n"
    found = check_copies(by_hand(LANE_ADDRESS + COPY + count + END))
    assert found.proven and found.states <= 4


@pytest.mark.parametrize("n", [0, 1])
def test_copies_under_way_at_the_end(n):
    """LDS belongs to another workgroup then."""
    text = by_hand(LANE_ADDRESS + COPY + f"s_waitcnt vmcnt({n})\n")
    assert kinds(text) == ({"at the end"} if n else set())
    assert not n or "LDS belongs to another workgroup" in str(check_copies(text).findings[0])


def test_which_wait_covers_a_copy():
    """The first that lets no more go than came after it; what it could say at most."""
    text = by_hand(LANE_ADDRESS + COPY + COPY + COPY + "s_waitcnt vmcnt(2)\n s_waitcnt vmcnt(0)\n")
    found = check_copies(text)
    line = [text.splitlines()[cover.wait.line - 1].strip() for cover in found.covers]
    assert list(zip(line, (cover.most for cover in found.covers), strict=True)) == [
        ("s_waitcnt vmcnt(2)", 2), ("s_waitcnt vmcnt(0)", 1), ("s_waitcnt vmcnt(0)", 0),
    ]  # fmt: skip
    assert str(found.covers[1]).endswith("which may be vmcnt(1)")


def test_a_kernel_without_copies():
    found = check_copies(by_hand(READ))
    assert found.proven and (found.copies, found.states) == (0, 0)


def test_what_is_too_much_is_not_proven(monkeypatch):
    monkeypatch.setattr(copies, "STATES", 2)
    found = check_copies(attention("gfx950"))
    assert not found.findings and not found.complete and not found.proven
