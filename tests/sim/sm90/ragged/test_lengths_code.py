"""The kernels of ragged batches and paged caches as code: what the machine gets, and which synchronisation it needs."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


from tests.cases import Case
from tests.drawn import drawn
from tests.sim.knocking import SM90_PREFILL, first_pass, knocked_out, reviewed
from tests.sim.sm90.lengths import in_parts, kernel, ready_for, run
from warpattn.kernels.sm90.prefill.config import SMEM_LIMIT
from warpattn.kernels.sm90.prefill_varlen.launch import list_launches
from warpattn.machine_code.roles import role_faults
from warpattn.machine_code.sass import opcode_counts, resources
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands
from warpattn.runtime import compiler
from warpattn.sim import KnockOut, Report, knock_out, loosen_waits, miscount

BASE = Case(dim=128, dtype=torch.bfloat16, heads_q=1, heads_kv=1, mask="causal")
RAGGED = replace(BASE, kind="ragged", batch=3, lens_q=(780, 0, 300))
PAGED = replace(BASE, kind="paged", batch=2, seq_q=780, lens_k=(780, 400))


def launches(case: Case, parts: int = 1) -> tuple[Launch, ...]:
    x = case.build()
    ready = ready_for(x)
    operands = Operands(x.q, x.k, x.v, torch.empty_like(x.q), torch.empty(ready.lse_shape), None)
    return list_launches(ready, operands, x.sequence, in_parts(ready, parts))


# Case, TMA loads by the producer's code and the second pass, bytes of stack: measured with Triton 3.9.0.
CODE = [(RAGGED, 26, 24), (replace(PAGED, page_size=64), 42, 0), (replace(PAGED, page_size=16), 138, 64)]


@pytest.mark.full
@pytest.mark.parametrize(("case", "loads", "stack"), drawn(CODE, CODE[2:]))
def test_machine_code(case, loads, stack):
    order, attention = launches(case)
    sorter, made = (compiler.compiled(s) for s in (order, attention))
    assert resources(sorter.asm["cubin"]).stack == 0
    used, counts = resources(made.asm["cubin"]), opcode_counts(made.asm["cubin"])
    assert made.metadata.shared <= SMEM_LIMIT
    assert used.stack <= stack
    assert role_faults(made.asm) == []
    assert counts["UTMALDG"] == loads and counts["UTMASTG"] == 2
    assert counts["HMMA"] == 0 and counts["HGMMA"] == 64, "the products of one warpgroup's code, which both run"


FIRST = ("ttng.arrive_barrier", "q_state = load_q(ctx, producer_state(", "programs without a tile end before")
reason = reviewed([*SM90_PREFILL, FIRST])


CHANGES = {way.__name__: partial(way, only=first_pass) for way in (knock_out, miscount, loosen_waits)}


def changed(case: Case, parts: int, change: Any) -> list[KnockOut]:
    """Every change of the attention kernel of a case is noticed by the values or findings, or reviewed."""
    x = case.build()
    ready = ready_for(x)

    def once(module: Any, schedule: str) -> Report:
        *_, reports = run(x, 1, ready, module, parts=parts, schedule=schedule, step_limit=20_000, first_finding=True)
        return reports[1]

    return knocked_out(kernel(launches(case, parts)[1]), once, reason, change=change)


@pytest.mark.full  # 2 minutes
@pytest.mark.parametrize("page_size", [0, 3, 64])
def test_the_kernel_needs_its_synchronisation(page_size):
    case = replace(PAGED, page_size=page_size) if page_size else RAGGED
    assert len(changed(case, 1, CHANGES["knock_out"])) > 40


SHORT = (60,) * 5  # so few keys that only Q's ring holds loads up
PART_CASES = {
    "ragged": replace(BASE, kind="ragged", batch=7, dim=64, lens_q=(300, 100, *SHORT), lens_k=(1300, 1100, *SHORT)),
    "pages": replace(BASE, kind="paged", batch=7, dim=64, seq_q=140, page_size=16, lens_k=(1300, 1100, *SHORT)),
}


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", PART_CASES)
def test_keys_in_parts_need_their_synchronisation(name, change):
    assert len(changed(PART_CASES[name], 2, CHANGES[change])) > 5
