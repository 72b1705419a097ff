"""Summarises a compiled AMD kernel: resources and instruction counts, for tests and for the command line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from .text import LANES, Code, Instruction, read

SIMDS = 4  # of a compute unit; waves of a workgroup are dealt to them in turn
# Bytes of LDS of a compute unit, by target; CDNA 3 and CDNA 4 ISA documents, "LDS".
LDS = {"gfx942": 65_536, "gfx950": 163_840}
_WAIT = re.compile(r"\b(vmcnt|expcnt|lgkmcnt)\((\d+)\)")
_NO_WAIT = {"vmcnt": 63, "lgkmcnt": 15}


@dataclass(frozen=True)
class Summary:
    """Resources and instruction counts of one kernel.

    vgprs, agprs, sgprs: registers of a wave, as allocated (vgprs and agprs share one file of 512 a lane).
    spills: registers kept in scratch memory (vector) or in lanes of vector registers (scalar), as the compiler counts.
    scratch: bytes of scratch memory a lane. lds: bytes of LDS a workgroup.
    waves: of a workgroup. occupancy: waves that a SIMD can hold at once, by registers and LDS together.
    waits: how many `s_waitcnt vmcnt(n)` there are, by n. counts: how often each instruction does.
    """

    target: str
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    waves: int
    occupancy: int
    waits: dict[int, int]
    counts: Counter[str]

    def count(self, *beginnings: str) -> int:
        """Count instructions that begin with one of the names: count("ds_read"), count("v_mfma")."""
        return sum(n for name, n in self.counts.items() if name.startswith(beginnings))

    @property
    def copies(self) -> int:
        """The number of copies to LDS that bypass registers: `buffer_load … lds`, `global_load_lds…`."""
        return self.counts["copy to LDS"]


def summary(text: str, lds: int = 0) -> Summary:
    """Read `kernel.asm["amdgcn"]`; `lds` are the bytes requested at launch, `kernel.metadata.shared`."""
    code = read(text)
    target = _target(text)
    waves = max(1, code.stated("max_flat_workgroup_size", LANES) // LANES)
    lds += code.stated("group_segment_fixed_size")
    held = code.stated("Occupancy")
    if lds and target in LDS:
        # A workgroup's waves spread over the SIMDs, so each SIMD holds a share of every workgroup that fits in LDS.
        held = min(held, max(1, ceil(LDS[target] // lds * waves / SIMDS)))
    vgprs, agprs = code.stated("NumVgprs"), code.stated("NumAgprs")
    return Summary(
        target=target,
        vgprs=vgprs,
        agprs=agprs,
        sgprs=code.stated("sgpr_count"),
        vgpr_spills=code.stated("vgpr_spill_count"),
        sgpr_spills=code.stated("sgpr_spill_count"),
        scratch=code.stated("private_segment_fixed_size"),
        lds=lds,
        waves=waves,
        occupancy=held,
        waits=_waits(code),
        counts=_counts(code.instructions),
    )


def _target(text: str) -> str:
    found = re.search(r"\bgfx[0-9a-f]+", text)
    return found.group() if found else ""


def _waits(code: Code) -> dict[int, int]:
    found = Counter(n for i in code.instructions if (n := wait_of(i, "vmcnt")) is not None)
    return dict(sorted(found.items()))


def _counts(instructions: Iterable[Instruction]) -> Counter[str]:
    """Count instructions by name; copies to LDS also under "copy to LDS"."""
    counts: Counter[str] = Counter()
    for instruction in instructions:
        counts[instruction.name] += 1
        counts["copy to LDS"] += instruction.to_lds
    return counts


def wait_of(instruction: Instruction, counter: str) -> int | None:
    """Return how many operations of `counter` may be under way after an instruction; None if it does not wait."""
    if instruction.name != "s_waitcnt":
        return None
    words = " ".join((*instruction.operands, instruction.modifiers))
    told = {name: int(n) for name, n in _WAIT.findall(words)}
    if not told:  # a plain number: vmcnt in bits 0-3 and 14-15, lgkmcnt in bits 8-11
        bits = int(instruction.operands[0], 0)
        told = {"vmcnt": bits & 15 | bits >> 10 & 48, "lgkmcnt": bits >> 8 & 15}
        told = {name: n for name, n in told.items() if n < _NO_WAIT[name]}
    return told.get(counter)


def rows(text: str, lds: int = 0, every: bool = False) -> list[tuple[str, str]]:
    """Return (name, value) rows about a kernel, for the command line; `every`: with each instruction's count."""
    found = summary(text, lds)
    listed = [
        ("vector registers, accumulation registers a lane", f"{found.vgprs} + {found.agprs}"),
        ("scalar registers a wave", str(found.sgprs)),
        ("spilled registers, vector + scalar", f"{found.vgpr_spills} + {found.sgpr_spills}"),
        ("scratch memory, bytes a lane", str(found.scratch)),
        ("LDS, bytes a workgroup", f"{found.lds:,}"),
        ("waves a workgroup", str(found.waves)),
        ("waves a SIMD can hold", str(found.occupancy)),
        ("machine code, instructions", f"{found.counts.total() - found.copies:,}"),
    ]
    if every:
        return [*listed, *((name, f"{n:,}") for name, n in found.counts.most_common() if n)]
    waits = ", ".join(f"vmcnt({n}) × {times}" for n, times in found.waits.items())
    notable = [
        ("v_mfma  matrix products", found.count("v_mfma")),
        ("buffer_load … lds  copies to LDS", found.copies),
        ("buffer_load, global_load  loads to registers", found.count("buffer_load", "global_load") - found.copies),
        ("buffer_store, global_store  stores", found.count("buffer_store", "global_store")),
        ("s_waitcnt  waits for memory", waits or "none"),
        ("ds_read  reads of LDS", found.count("ds_read")),
        ("ds_read … tr  of those, transposing", sum(n for name, n in found.counts.items() if "_tr_" in name)),
        ("ds_write  writes to LDS", found.count("ds_write")),
        ("s_barrier", found.counts["s_barrier"]),
        ("v_exp, v_log, v_rcp  special functions", found.count("v_exp", "v_log", "v_rcp")),
    ]
    return [*listed, *((name, n if isinstance(n, str) else f"{n:,}") for name, n in notable if n)]
