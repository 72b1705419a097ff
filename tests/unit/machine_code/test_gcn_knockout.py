"""Each wait of shipped machine code loosened by one and each barrier taken out: missed, or reviewed.

A sample; all shipped kernels of both chips are in tests/full/test_cdna_code.py.
"""

import inspect
import re

import pytest

pytest.importorskip("triton")

from tests.drawn import drawn
from tests.unit.machine_code.gcn_builds import by_hand
from tests.unit.machine_code.gcn_knockouts import built, changes, reason, survivors
from warpattn.kernels.cdna import feed
from warpattn.machine_code.gcn import check_copies, check_loads

SOURCE = inspect.getsource(feed).splitlines()
LOADS = {operand: next(i for i, line in enumerate(SOURCE, 1) if f"self.{operand.lower()}.load_from_dram(self."
                       f"{operand.lower()}_source, key, slot" in line) for operand in "KV"}  # fmt: skip
SAMPLE = [("gfx942", "decode in parts"), ("gfx942", "prefill pages of 64"), ("gfx950", "prefill ring"),
          ("gfx950", "decode"), ("gfx942", "prefill of 8 bits, a scale per token"),
          ("gfx950", "decode of 8 bits, a scale per head"),
          ("gfx950", "decode of 8 bits, a scale per token"), ("gfx942", "backward"),
          ("gfx950", "backward ragged, 64")]  # fmt: skip
DRAWN = [("gfx942", "decode in parts"), ("gfx950", "backward ragged, 64")]


@pytest.mark.parametrize(("arch", "name"), drawn(SAMPLE, DRAWN))
def test_each_wait_and_barrier_is_missed(arch, name):
    for text in built(arch, name):
        left = survivors(text)
        unexplained = [text.splitlines()[change.line] for change in left if reason(text, change) is None]
        assert not unexplained
        assert len(left) <= max(1, len(list(changes(text))) // 8)


# A wave copies to 0 and to 4096, waits, reads a kilobyte and waits for both copies again.
TWO_COPIES = """
    v_lshlrev_b32_e32 v1, 4, v0
    s_waitcnt lgkmcnt(0)
    s_mov_b32 m0, 0
    buffer_load_dwordx4 v5, s[0:3], 0 offen lds
    s_mov_b32 m0, 0x1000
    buffer_load_dwordx4 v5, s[0:3], 0 offen lds
    s_waitcnt vmcnt(0)
    v_nop
    ds_read_b128 v[8:11], v1 offset:{offset}
    s_waitcnt {last}
"""


@pytest.mark.parametrize(
    ("offset", "last", "survives", "explained"),
    [
        (0, "vmcnt(0)", True, True),
        (4096, "vmcnt(0)", False, False),  # the youngest copy is read
        (0, "lgkmcnt(0)", False, False),  # it lands after the end
        (8192, "vmcnt(0)", True, False),  # none is read
    ],
)
def test_a_wait_for_older_copies_alone(offset, last, survives, explained):
    text = by_hand(TWO_COPIES.format(offset=offset, last=last), waves=1)
    first = next(i for i, line in enumerate(text.splitlines()) if "vmcnt" in line)
    left = [change for change in survivors(text) if change.line == first]
    assert bool(left) == survives
    assert any(reason(text, change) is not None for change in left) == explained


def loosened(text: str, line: int, most: int) -> str:
    """With a wait that leaves one operation more than `most` under way."""
    lines = text.splitlines()
    lines[line - 1] = re.sub(r"vmcnt\(\d+\)", f"vmcnt({most + 1})", lines[line - 1])
    return "\n".join(lines)


def test_keys_and_values_of_pages_have_a_wait_each():
    """Decode on gfx950: loosened until it leaves K, or V, under way, no other wait covers the copy.

    V may be covered twice: by the wait for K's page of the next tile, and by the one for V's page directly after it.
    """
    text = built("gfx950", "decode pages of 16")[0]
    assert len(trail(text, "K")) == 1 and len(trail(text, "V")) <= 2


def trail(text: str, operand: str) -> list[int]:
    """How many waits are loosened in each round, until the copies of an operand in the loop are used too early."""
    rounds = []
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if "Loop Header" in line) + 1
    place = f"feed.py:{LOADS[operand]}"
    while not check_copies(text).findings:
        covers = [cover for cover in check_copies(text).covers if cover.copy.line > head and place in cover.copy.place]
        waits = {cover.wait.line for cover in covers if "vmcnt(0)" not in lines[cover.wait.line - 1]}
        assert waits
        for line in waits:
            text = loosened(text, line, min(cover.most for cover in covers if cover.wait.line == line))
        rounds.append(len(waits))
    assert {finding.kind for finding in check_copies(text).findings} == {"not awaited"}
    return rounds


LOADED = "buffer_load_dword v1, v9, s[0:3], 0 offen\n"
SCALAR = "s_load_dword s4, s[0:1], 0x0\n"


@pytest.mark.parametrize(
    ("body", "registers"),
    [
        (LOADED + "s_waitcnt vmcnt(0)\n v_mov_b32_e32 v2, v1\n", []),
        (LOADED + "v_mov_b32_e32 v2, v1\n", ["v1"]),
        (LOADED + "v_mov_b32_e32 v1, v2\n", ["v1"]),
        (LOADED + "v_max_f32_e64 v2, |v1|, -v1\n", ["v1"]),
        (LOADED + "s_waitcnt lgkmcnt(0)\n v_mov_b32_e32 v2, v1\n", ["v1"]),
        (LOADED + "buffer_store_dword v5, v6, s[0:3], 0 offen\n s_waitcnt vmcnt(1)\n v_mov_b32_e32 v2, v1\n", []),
        (LOADED + "buffer_store_dword v1, v6, s[0:3], 0 offen\n", ["v1"]),
        (LOADED + LOADED + "s_waitcnt vmcnt(1)\n v_mov_b32_e32 v2, v1\n", ["v1"]),
        (LOADED + "ds_read_b32 v1, v9\n", ["v1"]),
        ("ds_read_b64 v[4:5], v9\n ds_read_b32 v6, v9\n s_waitcnt lgkmcnt(1)\n v_mov_b32_e32 v2, v5\n", []),
        ("ds_read_b64 v[4:5], v9\n ds_read_b32 v6, v9\n s_waitcnt lgkmcnt(1)\n v_mov_b32_e32 v2, v6\n", ["v6"]),
        # Scalar loads come in any order, and LDS may overtake them.
        (SCALAR + "s_waitcnt lgkmcnt(0)\n s_mov_b32 s5, s4\n", []),
        (SCALAR + "ds_read_b32 v6, v9\n s_waitcnt lgkmcnt(1)\n s_mov_b32 s5, s4\n", ["s4"]),
        ("s_load_dwordx2 vcc, s[0:1], 0x0\n s_cbranch_vccz .LBB0_1\n.LBB0_1:\n", ["vcc_lo", "vcc_hi"]),
        # On one of two paths, and round a loop.
        ("s_cbranch_scc1 .LBB0_1\n" + LOADED + ".LBB0_1:\n v_mov_b32_e32 v2, v1\n", ["v1"]),
        (".LBB0_1:\n v_mov_b32_e32 v2, v1\n" + LOADED + "s_cbranch_scc1 .LBB0_1\n", ["v1"]),
        # Copies to LDS count, and load no register.
        (LOADED + "buffer_load_dword v5, s[0:3], 0 offen lds\n s_waitcnt vmcnt(1)\n v_mov_b32_e32 v2, v1\n", []),
        ("buffer_load_dword v5, s[0:3], 0 offen lds\n v_mov_b32_e32 v5, v1\n", []),
    ],
)
def test_loaded_registers(body, registers):
    found = check_loads(by_hand(body))
    assert sorted(early.register for early in found) == sorted(registers)
    assert all(f"{early.register} is used in line" in str(early) for early in found)
