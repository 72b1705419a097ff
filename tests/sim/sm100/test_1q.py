"""The Blackwell kernel of one query tile, whole and split: right values, no findings, every synchronisation needed."""

from dataclasses import dataclass, field, replace

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn, in_turn
from tests.oracle import UNWRITTEN, Inputs, check, poisoned
from tests.sim.knocking import AFTER, FRESH, SM100_FENCES, knocked_out, reviewed
from tests.sim.sm100.test_lengths import paged
from warpattn import attention_paged
from warpattn.kernels.sm100.config import SMEM_LIMIT
from warpattn.kernels.sm100.prefill_1q.config import choice_of, choose_1q
from warpattn.kernels.sm100.prefill_2q.config import prefill_config
from warpattn.kernels.sm100.select import choose, launches_of_choice
from warpattn.machine_code.sass import opcode_counts, resources
from warpattn.masks import Causal, CustomMask, Full, Mask, Materialized, Padding, Prefix, SlidingWindow
from warpattn.problem import Call, CheckedCall, Problem, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime import compiler
from warpattn.runtime.bound_launches import layout_of
from warpattn.runtime.kernel_parameters import parameters
from warpattn.runtime.simulate import Options, run_launch
from warpattn.runtime.simulate import _kernel as compiled
from warpattn.scores import ALiBi, Bias, Score, SoftCap
from warpattn.sequences import Dense
from warpattn.sim import Report, simulate

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), ("random", 1)]


@dataclass(frozen=True)
class Case:
    """A dense problem and the number of parts of its keys."""

    seq_q: int
    seq_k: int
    heads: int = 2
    heads_kv: int = 1
    dim: int = 128
    dim_v: int = 0
    batch: int = 1
    parts: int = 1
    mask: Mask = Full()  # noqa: RUF009  frozen
    score: Score | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    soft_cap: bool = field(default=False, kw_only=True)
    spread: float = field(default=1.0, kw_only=True)  # of the scores: with 8 the softmax moves its reference often

    def inputs(self) -> Inputs:
        torch.manual_seed(0)
        q = (self.spread * torch.randn(self.batch, self.seq_q, self.heads, self.dim)).to(self.dtype)
        k = torch.randn(self.batch, self.seq_k, self.heads_kv, self.dim).to(self.dtype)
        v = torch.randn(self.batch, self.seq_k, self.heads_kv, self.dim_v or self.dim).to(self.dtype)
        sinks = torch.randn(self.heads) if self.sinks else None
        return Inputs(q, k, v, Dense(), self.mask, self.score, sinks, soft_cap=self.soft_cap)

    def list_launches(self, inputs: Inputs) -> tuple[tuple[Launch, ...], Operands]:
        """The launches, with the workspace poisoned, and the operands that they fill."""
        call = Call(inputs.q, inputs.k, inputs.v, Dense(), inputs.mask, inputs.score, inputs.sinks, return_lse=True,
                    backend="simulate:sm100")  # fmt: skip
        ready: CheckedCall = validate(call)
        out = poisoned((*inputs.q.shape[:3], inputs.v.shape[3]), self.dtype)
        x = fitted(Operands(inputs.q, inputs.k, inputs.v, out, poisoned(ready.lse_shape, torch.float32), inputs.sinks))
        config = replace(prefill_config(ready.problem)[0], BM=128, splitk_partitions=self.parts).gluon()[0]
        assert config.supported() == ()
        steps = launches_of_choice(ready, x, Dense(), choice_of(ready.problem, config))
        if self.parts > 1:
            steps[0].args["o_desc"].fill_(torch.nan)
            steps[0].args["lse_ptr"].fill_(UNWRITTEN)
        return steps, x


def run(case: Case, schedule: str = "lazy", seed: int = 0) -> list[Report]:
    """Simulate a case and hold its values against the oracle's rule."""
    inputs = case.inputs()
    steps, x = case.list_launches(inputs)
    reports = [run_launch(step, Options(schedule, seed)) for step in steps]
    for report in reports:
        assert report.clean, report
    check(inputs, x.out, x.lse)
    return reports


NOTHING = CustomMask(lambda b, h, q, k: k < 0)
VISIBLE = torch.rand(1, 1, 100, 300, generator=torch.Generator().manual_seed(1)) < 0.7
LENGTHS = Padding(torch.tensor([2900, 100]))  # the second sequence leaves one part of two without keys
CASES = {
    "one-tile": Case(128, 100),
    "two-tiles": Case(100, 200, mask=Causal()),
    "three-tiles": Case(100, 300, batch=2),
    "many": Case(200, 900, mask=Causal()),
    "moving-reference": Case(100, 900, spread=8.0),
    "shared-ring": Case(70, 2000, dim=64),
    "shared-ring-causal": Case(300, 300, dim=64, mask=Causal()),
    "one-row": Case(1, 700, heads=8, heads_kv=2),
    "odd-dims": Case(60, 300, dim=80, dim_v=96),
    "wide-values": Case(60, 300, dim=64, dim_v=128),
    "narrow-values": Case(60, 300, dim=128, dim_v=64),
    "fp16": Case(60, 300, dtype=torch.float16, mask=Causal()),
    "unfused": Case(60, 300, heads=3, mask=SlidingWindow(70, 10)),
    "materialized": Case(100, 300, mask=Materialized(VISIBLE)),
    "padding": Case(60, 200, batch=2, mask=Padding(torch.tensor([150, 0]))),
    "prefix": Case(200, 200, mask=Prefix(50)),
    "nothing-visible": Case(60, 300, mask=NOTHING),
    "sinks": Case(60, 300, mask=Causal(), sinks=True),
    "sinks-nothing-visible": Case(60, 300, mask=NOTHING, sinks=True),
    "alibi": Case(60, 300, heads=4, mask=Causal(), score=ALiBi(torch.tensor([0.5, 0.25, 0.1, 0.05]))),
    "soft-cap": Case(60, 300, score=SoftCap(3.0), soft_cap=True),
    "bias": Case(60, 300, score=Bias(torch.randn(1, 2, 60, 300, generator=torch.Generator().manual_seed(2)))),
    "split-2": Case(60, 700, parts=2, mask=Causal()),
    "split-4": Case(60, 700, parts=4, batch=2, heads=4, heads_kv=2),
    "split-8": Case(150, 1100, parts=8, mask=Causal(), sinks=True),
    "split-16": Case(3, 2300, parts=16, heads=8, dim=64),
    "split-empty-parts": Case(60, 300, parts=8, dim_v=64, sinks=True),
    "split-shared-ring": Case(200, 700, parts=4, dim=64, dim_v=128, mask=SlidingWindow(200, 0)),
    "split-nothing-visible": Case(60, 300, parts=2, mask=NOTHING),
    "split-sinks-nothing-visible": Case(60, 300, parts=2, mask=NOTHING, sinks=True),
    "split-score": Case(60, 500, parts=2, heads=3, mask=Causal(), score=SoftCap(3.0), soft_cap=True),
    "odd-dims-materialized": Case(100, 300, dim=80, dim_v=96, mask=Materialized(VISIBLE)),
    "narrow-values-fp16-prefix": Case(200, 200, dim=128, dim_v=64, dtype=torch.float16, mask=Prefix(50)),
    "padding-bias": Case(
        60,
        200,
        batch=2,
        mask=Padding(torch.tensor([150, 0])),
        score=Bias(torch.randn(1, 2, 60, 200, generator=torch.Generator().manual_seed(2))),
    ),
}
# Every kind of mask, score and head dim occurs in one of these, or in a test below.
DRAWN = ("split-empty-parts",)


@pytest.mark.parametrize("name", drawn(CASES, DRAWN))
def test_values(name):
    run(CASES[name])


KINDS = ("many", "shared-ring", "moving-reference", "split-4", "split-empty-parts", "wide-values")
KEPT = ("split-empty-parts",)


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(KINDS, KEPT, SCHEDULES, each=4))
def test_every_schedule(name, schedule, seed):
    run(CASES[name], schedule, seed)


@pytest.mark.parametrize("seq_k", [1, 2, 63, 64, 65, 127, 128, 129, 257, 385])
@pytest.mark.parametrize("parts", drawn([1, 2], [1]))
def test_odd_lengths(seq_k, parts):
    run(Case(33, seq_k, parts=parts, sinks=True))


# Operation, what stands in one of its lines of Python, why it can go.
REDUNDANT = [
    *SM100_FENCES,
    (AFTER, "await_signal(ctx.bars.o_producer.index(wg), (mine.run.total - 1)", "that of the other half follows"),
    ("ttng.fence_async_shared", "    fence_async_shared()\n", "it makes new barriers visible to TMA: not modelled"),
    ("ttng.wait_barrier", "await_signal(ctx.bars.o_producer.index(wg), (n - 1) & 1)",
     "the commit of S also waits for the P·V before it, and the scale is sent after S has been read"),
    ("ttng.wait_barrier", "await_signal(ctx.bars.c_consumer.index(wg)",
     "this S was made after the P·V that the correction let go when it had read the scale before"),
    ("ttng.async_tma_store_wait", "read_only=False", "for tiles that met hidden values: see test_hidden_values.py"),
    ("ttng.wait_barrier", "state = load_k(ctx, ring, ring.start(), ctx.run.key_tile(0), True)", FRESH),
    ("ttng.wait_barrier", "state = load_k(ctx, ring, state, ctx.run.key_tile(1), False)", FRESH),
]  # fmt: skip
reason = reviewed(REDUNDANT)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(60, 808, heads=1, spread=8.0), id="two-rings", marks=pytest.mark.full),
        pytest.param(
            Case(60, 2900, 1, 1, 64, batch=2, parts=2, spread=8.0, mask=LENGTHS),
            id="shared-ring-split",
            marks=pytest.mark.full,
        ),
    ],
)
def test_every_synchronisation_is_needed(case):
    inputs = case.inputs()
    steps, _ = case.list_launches(inputs)
    kernel = compiled(steps[0])

    def once(module, schedule) -> Report:
        return simulate(module, steps[0].grid, steps[0].args, schedule, step_limit=20_000, first_finding=True)

    results = knocked_out(kernel, once, reason)
    barriers = [found for found in results if not found.op.startswith("tcgen05.fence")]
    assert sum(found.noticed for found in barriers) > 0.8 * len(barriers)


PAGES = [
    ((600, 0, 129), 16, 128),
    ((700, 65, 1), 64, 64),
    ((900,), 256, 128),
    ((300, 0, 129), 1, 128),
    ((500, 65, 2), 20, 64),
]
PAGED = [(*pages, parts) for pages in PAGES for parts in (0, 1, 4)]


@pytest.mark.parametrize(("lengths", "page", "dim", "parts"), drawn(PAGED, [(*PAGES[1], 1)]))
def test_paged_keys(lengths, page, dim, parts):
    """Pages of no sequence and the tails of last pages hold NaN; table entries past a length point outside. 0 parts:
    the kernel of two query tiles, which a chip with a single SM gets."""
    torch.manual_seed(0)
    q, sequence = paged(lengths, 5, 8, 2, dim, page)
    ready = validate(Call(q, q, q, sequence, Causal(), return_lse=True, backend="simulate:sm100"))
    out = poisoned(tuple(q.shape), q.dtype)
    lse = poisoned(ready.lse_shape, torch.float32)
    x = fitted(Operands(q, sequence.k_pages, sequence.v_pages, out, lse, None))
    chosen = choose(ready.problem, replace(ARCHS["sm100"], processors=1))
    assert chosen.config.num_q == 2
    if parts > 0:
        chosen = choose_1q(ready.problem, chosen.config, ARCHS["sm100"])
        assert chosen is not None
        config = replace(chosen.config, splitk_partitions=parts)
        chosen = choice_of(ready.problem, config)
    for step in launches_of_choice(ready, x, sequence, chosen):
        report = run_launch(step, Options("lazy", 0))
        assert report.clean, report
    expected = attention_paged(q, sequence, mask=Causal(), return_lse=True, backend="reference")
    torch.testing.assert_close(out, expected[0], atol=4e-3, rtol=0)
    torch.testing.assert_close(lse, expected[1], atol=1e-4, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize(("dim", "parts"), drawn([(128, 1), (64, 1), (128, 4)], [(128, 4)]))
def test_machine_code(dim, parts):
    """Loads and products as the config makes them; three quarters of the exponentials on the unit; and no spills but of
    the thread's number and seq_k - seq_q, which ptxas makes once for all roles and reads again outside of the loops."""
    case = Case(60, 700, dim=dim, parts=parts, mask=Causal())
    step = case.list_launches(case.inputs())[0][0]
    config = step.key[0]
    kernel = compiler.compiled(step)
    used, counts = resources(kernel.asm["cubin"]), opcode_counts(kernel.asm["cubin"])
    assert used.stack <= 16 and used.spill_stores <= 3
    assert config.smem_used <= kernel.metadata.shared <= min(config.smem_used + 512, SMEM_LIMIT)
    assert kernel.metadata.tmem_size == 512 >= config.tmem_used
    assert kernel.metadata.num_warps * 32 == config.topology.threads
    qk, pv = config.padded_qk_depth // 16, config.BN // 16
    assert counts["UTCHMMA"] == 4 * qk + 2 * pv, "Q·K before and in the loop, P·V in the loop, for each accumulator"
    assert counts["UTMALDG"] == 4 * config.num_qk_stages + 1 + (config.num_qk_stages == 2), counts
    exponentials = 2 * config.BN * 3 // 4
    assert exponentials <= counts["MUFU"] <= exponentials + 16
    assert counts["FFMA2"] >= 2 * (config.BN // 2 + 3 * config.BN // 8), "exponents, and the polynomial of a quarter"


def test_parts_have_tensor_maps_of_fp32():
    """What a launch on a card would tell TMA about the workspace: byte strides, and rows of 128 bytes in a box."""
    case = Case(60, 1100, heads=4, heads_kv=2, parts=2)
    step = case.list_launches(case.inputs())[0][0]
    (parameter,) = (p for p in parameters(step.source().signature) if p.name == "o_desc")
    o = step.args["o_desc"]
    layout = layout_of(tuple(o.shape), o.stride(), parameter, step.l2_promotion)
    assert (layout.dtype, layout.swizzle, layout.box) == ("fp32", 128, (1, 64, 2, 32))
    assert layout.strides == tuple(4 * stride for stride in o.stride()[:3])


def problem(seq_q: int, seq_k: int, batch: int = 1, heads: int = 8, dim: int = 128) -> Problem:
    q, k = torch.empty(batch, seq_q, heads, dim), torch.empty(batch, seq_k, 2, dim)
    q, k = q.bfloat16(), k.bfloat16()
    return validate(Call(q, k, k, Dense(), backend="simulate:sm100")).problem


def choice(p: Problem):
    return choose_1q(p, prefill_config(p)[0], ARCHS["sm100"])


@pytest.mark.parametrize(
    ("p", "parts", "grid"),
    [
        (problem(16, 200), 1, (1, 2, 1)),
        (problem(16, 1024), 2, (2, 2, 1)),
        (problem(16, 4096), 8, (8, 2, 1)),
        (problem(16, 100_000), 16, (16, 2, 1)),
        (problem(128, 100_000, batch=2), 8, (32, 2, 2)),
        (problem(1024, 1024), 2, (64, 2, 1)),
    ],
)
def test_keys_are_split_where_tiles_do_not_fill_the_chip(p, parts, grid):
    chosen = choice(p)
    assert (chosen.partitions, chosen.grid) == (parts, grid)
    assert chosen.config.supported() == () and chosen.config.num_q == 1
    assert chosen.reasons and (parts == 1 or f"shared out over {parts} CTAs" in chosen.reasons[-1])


def test_full_chips_get_two_query_tiles():
    assert choice(problem(8192, 8192)) is None
    assert choice(problem(128, 4096, batch=148)) is None


def test_results_are_the_same_under_every_schedule_and_split():
    """Bit for bit under every schedule; splitting moves rounding only."""
    case = replace(CASES["split-empty-parts"], seq_k=1100)
    inputs, outs = case.inputs(), []
    for schedule, seed in SCHEDULES:
        steps, x = case.list_launches(inputs)
        for step in steps:
            run_launch(step, Options(schedule, seed))
        outs.append(x.out)
    assert all(torch.equal(out, outs[0]) for out in outs)
