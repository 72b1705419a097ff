"""Head dims above 256, on Blackwell above 128, in the simulator: every kind of sequence and of step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.cases import Case
from tests.drawn import drawn
from tests.oracle import Inputs, check, poisoned
from tests.sim.knocking import FRESH, knocked_out, reviewed
from tests.sim.sm100.test_mla import REDUNDANT
from warpattn.problem import CheckedCall, validate
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands
from warpattn.problem.problem import Call
from warpattn.runtime.launches import list_launches
from warpattn.runtime.plan import plan
from warpattn.runtime.simulate import Options, dependent, run_launch, traced
from warpattn.sim import Report, simulate

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), ("random", 0), ("random", 1)]
BF16 = torch.bfloat16
DENSE = Case(batch=1, seq_q=150, seq_k=170, heads_q=2, heads_kv=1, dim=512, dtype=BF16, mask="causal")
PAGED = replace(DENSE, kind="paged", batch=2, lens_k=(90, 37), seq_q=40, page_size=16)
CASES = {
    "prefill": DENSE,
    "prefill-128-320": replace(DENSE, dim=128, dim_v=320),  # blocks of 160 columns, stored 64 at a time
    "prefill-320-264": replace(DENSE, dim=320, dim_v=264, dtype=torch.float16, mask="full", sinks=True),
    "prefill-512-64": replace(DENSE, dim_v=64, score="softcap"),
    "prefill-64-512": replace(DENSE, dim=64, dim_v=512, mask="window"),
    "grouped": replace(DENSE, seq_q=20, heads_q=8, score="alibi"),
    "ragged": replace(DENSE, kind="ragged", lens_q=(70, 0, 5, 130), lens_k=(90, 4, 5, 150)),
    "paged": PAGED,
    "pages-of-3": replace(PAGED, page_size=3, mask="padding", dim=384),
    "paged-ragged": replace(PAGED, kind="paged-ragged", lens_q=(1, 30)),
    "decode": replace(DENSE, batch=2, seq_q=1, seq_k=700, heads_q=8, sinks=True),
    "decode-many-rows": replace(DENSE, seq_q=5, seq_k=600, heads_q=8, score="softcap"),
    "decode-paged": replace(PAGED, seq_q=2, lens_k=(300, 37), heads_q=4, mask="window"),
    "decode-pages-of-12": replace(PAGED, seq_q=1, lens_k=(300, 37), page_size=12),
    "decode-320-264": replace(DENSE, seq_q=1, seq_k=600, dim=320, dim_v=264, heads_q=4, dtype=torch.float16),
    "decode-512-32": replace(DENSE, seq_q=1, seq_k=600, dim_v=32),
}
OF_BLACKWELL = {
    "prefill-256": replace(DENSE, dim=256, seq_q=200),
    "prefill-192-128": replace(DENSE, dim=192, dim_v=128, heads_kv=2, dtype=torch.float16),
    "prefill-128-136": replace(DENSE, dim=128, dim_v=136, sinks=True),
    "grouped-256": replace(DENSE, dim=256, heads_q=6, seq_q=70, score="softcap", mask="window"),
    "ragged-256": replace(DENSE, dim=256, kind="ragged", lens_q=(70, 0, 5, 130), lens_k=(90, 4, 5, 150)),
    "pages-of-4-256": replace(PAGED, dim=256, page_size=4, heads_q=4),
    "decode-256": replace(DENSE, dim=256, batch=2, seq_q=1, seq_k=1300, heads_q=8, sinks=True),
}
# Every kind of mask, score and page, and every block and split of head dims. Hopper has one kernel for all prefill
# with lengths, and its step of ragged queries over pages is that one and decode.
DRAWN = {
    "sm90": ("prefill-320-264", "decode-512-32"),
    "sm100": ("prefill-64-512", "decode-320-264"),
}
ON = [("sm90", name) for name in CASES] + [("sm100", name) for name in CASES | OF_BLACKWELL]
CASES |= OF_BLACKWELL
KINDS = {"dense": "prefill", "ragged": "prefill_varlen", "paged": "prefill_varlen", "paged-ragged": "paged_ragged"}


def checked(x: Inputs, arch: str = "sm90") -> CheckedCall:
    call = Call(x.q, x.k, x.v, x.sequence, x.mask, x.score, x.sinks, x.scale, True, None, f"simulate:{arch}")
    return validate(call)


def operands(x: Inputs, ready: CheckedCall) -> Operands:
    """With outputs of NaN."""
    out = poisoned((*x.q.shape[:-1], ready.problem.dim_v), x.q.dtype)
    return Operands(x.q, x.k, x.v, out, poisoned(ready.lse_shape, torch.float32), x.sinks)


@pytest.mark.parametrize(("schedule", "seed"), drawn(SCHEDULES, [("lazy", 0)]))
@pytest.mark.parametrize(("arch", "name"), drawn(ON, [(arch, name) for arch in DRAWN for name in DRAWN[arch]]))
def test_right_and_without_findings(arch: str, name: str, schedule: str, seed: int) -> None:
    x = CASES[name].build()
    ready = checked(x, arch)
    given = operands(x, ready)
    report = traced(ready, given, Options(schedule, seed, programs=3), x.sequence)
    assert report.clean, report
    check(x, given.out, given.lse)


@pytest.mark.parametrize(("arch", "name"), ON)
def test_the_plan_says_what_runs(arch: str, name: str) -> None:
    case = CASES[name]
    problem = checked(case.build(), arch).problem
    found = str(plan(problem, arch))
    if arch == "sm100":
        assert found.startswith("sm100.wide") and "head dims above 128: one tile of" in found
        return
    assert found.startswith("sm90.decode" if name.startswith("decode") else f"sm90.{KINDS[case.kind]}")
    blocks = f"values of > 256 columns: 2 launches of {136 if problem.dim_v == 264 else problem.dim_v // 2},"
    assert (blocks in found) == (problem.dim_v > 256 and not name.startswith("decode"))


@pytest.mark.parametrize("arch", drawn(["sm90", "sm100"], ["sm100"]))
def test_keys_in_parts_are_combined_once(arch: str) -> None:
    """On Hopper a launch for each block of values, which leave their columns in one workspace."""
    x = replace(DENSE, seq_q=30, seq_k=2100, heads_q=1, dim_v=264).build()
    ready = checked(x, arch)
    given = operands(x, ready)
    launches = list_launches(ready, given, x.sequence)
    kernels = ["sm90.prefill", "sm90.prefill"] if arch == "sm90" else ["sm100.wide"]
    assert [launch.name for launch in launches] == [*kernels, f"{arch}.combine"]
    assert all(run_launch(launch, Options(programs=4)).clean for launch in launches)
    check(x, given.out, given.lse)


@pytest.mark.parametrize("lens", [(770, 37), (1150, 0)])
def test_decode_in_more_parts_than_registers_hold(lens: tuple[int, int]) -> None:
    """12 or 18 parts of 512 columns: the CTA that adds them up holds 8 at once."""
    x = replace(CASES["decode-paged"], seq_q=1, lens_k=lens, mask="full").build()
    ready = checked(x)
    given = operands(x, ready)
    report = traced(ready, given, Options("lazy", programs=20), x.sequence)
    assert report.clean, report
    check(x, given.out, given.lse)


@pytest.mark.full
def test_hidden_values_of_nan_reach_nobody() -> None:
    """In either block of columns: rows that see no such value are computed again."""
    q, k, v = (torch.randn(1, 100, 1, 512).to(BF16) for _ in range(3))
    v[0, 80:, 0, ::3] = float("nan")
    mask = wa.Causal() & wa.Padding(torch.tensor([80]))
    out = wa.attention(q, k, v, mask=mask, backend="simulate:sm90")
    expected = wa.attention(*(x.float() for x in (q, k, v.nan_to_num(0.0))), mask=mask)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=0)


FIRST = ("ttng.wait_barrier", "state = load_tile(ctx, ctx.k, state, 0, config.k_blocks)", FRESH)
KNOCKED = {  # with more tiles than slots
    "256": replace(CASES["prefill-256"], seq_k=600),
    "pages-of-3": replace(CASES["pages-of-3"], lens_k=(330, 37)),
    "ragged": CASES["ragged"],
}


@pytest.mark.parametrize("name", drawn(KNOCKED, ["ragged"]))
def test_the_blackwell_kernel_needs_its_synchronisation(name: str) -> None:
    """Hopper's prefill is in machine/findings/test_knockout.py, its decode in sm90/decoding/test_decode_knockout.py."""
    x = replace(KNOCKED[name], heads_q=1, heads_kv=1).build()
    ready = checked(x, "sm100")
    launch = list_launches(ready, operands(x, ready), x.sequence)[0]
    found = knocked_out(*knocking(launch))
    assert sum(each.noticed for each in found) > 0.6 * len(found)


def knocking(launch: Launch):
    """What `knocked_out` takes: the module of a launch, what runs it, and why operations can go."""
    from warpattn.runtime.simulate import _kernel as compiled

    def once(module: object, schedule: str) -> Report:
        grid = (min(max(2, launch.persistent), launch.grid[0]),) if launch.persistent else launch.grid
        return simulate(module, dependent(launch, grid), launch.args, schedule, step_limit=20_000, first_finding=True)

    return compiled(launch), once, reviewed([*REDUNDANT, FIRST])


@pytest.mark.parametrize("arch", drawn(["sm90", "sm100"], ["sm100"]))
def test_a_sink_of_nan_shows_without_a_key(arch: str) -> None:
    """The row has no product, so the output is made of nothing but its factor."""
    q, k, v = (torch.randn(rows, heads, 160).half() for rows, heads in ((10, 2), (40, 1), (40, 1)))
    seq = wa.Ragged(torch.tensor([0, 4, 10]).int(), torch.tensor([0, 0, 40]).int())
    tail = {"sinks": torch.tensor([0.5, float("nan")]), "return_lse": True}
    backends = (f"simulate:{arch}", "reference")
    found, wanted = (wa.attention_varlen(q, k, v, seq, **tail, backend=backend) for backend in backends)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.float(), y.float(), atol=1e-2, rtol=0, equal_nan=True)
