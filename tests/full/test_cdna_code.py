"""Machine code of all shipped CDNA kernels: order of LDS, loaded registers, spills, and what each wait is for."""

import pytest
import torch

pytest.importorskip("triton")

from tests.cases import MASKS, Case
from tests.sim import backward
from tests.unit.machine_code.gcn_knockouts import BUILDS, built, launches, machine_code, reason, survivors
from warpattn.machine_code.gcn import check_copies, check_loads, summary
from warpattn.problem import Call

pytestmark = pytest.mark.full

ARCHS = ("gfx942", "gfx950")
BASE = Case(batch=1, seq_q=200, seq_k=300, heads_q=4, heads_kv=2, dim=128, dtype=torch.bfloat16, sinks=True)
LAYOUTS = {
    "dense": {},
    "ragged": {"kind": "ragged", "batch": 2, "lens_q": (30, 200), "lens_k": (300, 200)},
    "paged": {"kind": "paged", "lens_k": (300,), "page_size": 16},
    "decode": {"seq_q": 1, "heads_q": 8},
}
# Scalars in lanes of a vector register: two pointers that the end needs, written before the loop over key tiles and
# read behind it.
IN_LANES = {("causal-documents", 128, "ragged", "gfx950"): 4}


@pytest.mark.parametrize(("arch", "name"), BUILDS)
def test_each_wait_and_barrier_is_missed(arch, name):
    for text in built(arch, name):
        left = survivors(text)
        assert not [text.splitlines()[change.line] for change in left if reason(text, change) is None]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_is_proven_and_spills_nothing(arch, layout, dim, mask):
    x = Case(**{**vars(BASE), **LAYOUTS[layout], "dim": dim, "mask": mask}).build()
    call = Call(x.q, x.k, x.v, x.sequence, x.mask, x.score, x.sinks, x.scale, True)
    check_code(launches(call, arch), IN_LANES.get((mask, dim, layout, arch), 0))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", ["dense", "ragged"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_no_backward_spills_to_memory(arch, layout, dim, mask):
    """Masks that read a tensor for each pair keep scalars in lanes of vector registers."""
    x = Case(**{**vars(BASE), **LAYOUTS[layout], "dim": dim, "mask": mask}).build()
    lengths = ((30, 300), (200, 200)) if layout == "ragged" else ()
    case = backward.Case(
        200, 300, heads=4, heads_kv=2, dim=dim, mask=x.mask, score=x.score, sinks=True, lengths=lengths, arch=arch
    )
    for step in backward.launches_of(case):
        text = machine_code(step)
        assert check_copies(text).proven and not check_loads(text)
        found = summary(text)
        assert (found.vgpr_spills, found.scratch) == (0, 0) and found.sgpr_spills <= 48


def check_code(steps, in_lanes):
    for step in steps:
        text = machine_code(step)
        assert check_copies(text).proven and not check_loads(text)
        found = summary(text)
        assert (found.vgpr_spills, found.scratch) == (0, 0) and found.sgpr_spills <= in_lanes
