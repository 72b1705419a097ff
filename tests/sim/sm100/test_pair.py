"""The Blackwell kernel of a pair of CTAs: right values, no findings, every synchronisation needed, code for pairs."""

import linecache
from dataclasses import dataclass, field, replace

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn, in_turn
from tests.oracle import Inputs, check, poisoned
from tests.sim.knocking import BEFORE, FRESH, SM100_FENCES, UNTOUCHED, knocked_out, reviewed
from warpattn.errors import AttentionError
from warpattn.kernels.sm100.config import SMEM_LIMIT
from warpattn.kernels.sm100.prefill_2cta.config import pair_choice
from warpattn.kernels.sm100.prefill_2q.config import prefill_config
from warpattn.kernels.sm100.select import launches_of_choice
from warpattn.machine_code.sass import opcode_counts, resources
from warpattn.masks import Causal, CustomMask, Full, Mask, Padding, SlidingWindow
from warpattn.problem import Call, validate
from warpattn.problem.launch import Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime import compiler
from warpattn.runtime.simulate import Options, run_launch
from warpattn.runtime.simulate import _kernel as compiled
from warpattn.scores import ALiBi, Score, SoftCap
from warpattn.sequences import Dense
from warpattn.sim import KnockOut, Report, simulate
from warpattn.sim.memory.tensor_memory import TensorBuffer

SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), ("random", 1), ("random", 2)]


@dataclass(frozen=True)
class Case:
    """A dense problem."""

    seq_q: int
    seq_k: int
    heads: int = 1
    heads_kv: int = 1
    dim: int = 128
    dim_v: int = 0
    batch: int = 1
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

    def step(self, inputs: Inputs) -> tuple[Launch, Operands]:
        """The launch, and the operands that it fills."""
        call = Call(inputs.q, inputs.k, inputs.v, Dense(), inputs.mask, inputs.score, inputs.sinks, return_lse=True,
                    backend="simulate:sm100")  # fmt: skip
        ready = validate(call)
        out = poisoned((*inputs.q.shape[:3], inputs.v.shape[3]), self.dtype)
        x = fitted(Operands(inputs.q, inputs.k, inputs.v, out, poisoned(ready.lse_shape, torch.float32), inputs.sinks))
        config = replace(prefill_config(ready.problem)[0], pair_cta=True, max_qk_stages=None)
        (step,) = launches_of_choice(ready, x, Dense(), pair_choice(ready.problem, config))
        return step, x


NOTHING = CustomMask(lambda b, h, q, k: k < 0)
CASES = {
    "full": Case(512, 256),
    "causal": Case(1000, 1000, mask=Causal()),
    "short": Case(5, 1, heads=2, heads_kv=2),
    "rectangular": Case(300, 700, batch=2, mask=Causal()),
    "moving-reference": Case(400, 900, spread=8.0),
    "group-4": Case(200, 300, heads=8, heads_kv=2, mask=Causal(), sinks=True),
    "unfused": Case(200, 300, heads=3, mask=SlidingWindow(70, 10)),
    "odd-dims": Case(300, 300, dim=80, dim_v=96),
    "fp16": Case(300, 300, dtype=torch.float16, mask=Causal()),
    "padding": Case(300, 300, batch=2, mask=Padding(torch.tensor([150, 0]))),
    "sinks-nothing-visible": Case(300, 300, mask=NOTHING, sinks=True),
    "alibi": Case(300, 300, heads=4, mask=Causal(), score=ALiBi(torch.tensor([0.5, 0.25, 0.1, 0.05]))),
    "soft-cap": Case(300, 300, score=SoftCap(3.0), soft_cap=True),
    "odd-dims-fp16-soft-cap": Case(300, 300, dim=80, dim_v=96, dtype=torch.float16, score=SoftCap(3.0), soft_cap=True),
}
# Every kind of mask, score and head dim occurs in one of these, or in WAYS.
DRAWN = ("causal",)
WAYS = ("causal", "moving-reference", "group-4")


def run(case: Case, schedule: str = "lazy", seed: int = 0) -> None:
    """Simulate a case and hold its values against the oracle's rule."""
    inputs = case.inputs()
    step, x = case.step(inputs)
    report = run_launch(step, Options(schedule, seed))
    assert report.clean, report
    check(inputs, x.out, x.lse)


@pytest.mark.parametrize("name", drawn(CASES, DRAWN))
def test_values(name):
    run(CASES[name])


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(WAYS, ("causal",), SCHEDULES, each=5))
def test_every_schedule(name, schedule, seed):
    run(CASES[name], schedule, seed)


def test_the_output_is_left_alone_while_no_reference_moves(monkeypatch):
    """A rescaling is eight stores to tensor memory; two query tiles, six key tiles after the first, two CTAs."""
    written = []
    write = TensorBuffer.write
    monkeypatch.setattr(TensorBuffer, "write", lambda *args: (written.append(0), write(*args))[1])
    run(Case(512, 896, spread=0.1))
    calm = len(written)
    run(Case(512, 896, spread=8.0))
    moving = len(written) - calm
    assert 0 < moving - calm <= 8 * 2 * 6 * 2 and (moving - calm) % 8 == 0


@pytest.mark.parametrize("seq_k", [1, 63, 64, 65, 127, 128, 129, 257, 1000])
def test_odd_lengths(seq_k):
    run(Case(257, seq_k))


# Operation, what stands in one of its lines of Python, why it can go.
REDUNDANT = [
    *SM100_FENCES,
    (BEFORE, "notify(ctx, ctx.bars.s_consumer.index(0))", UNTOUCHED),
    (BEFORE, "notify(ctx, ctx.bars.s_consumer.index(2))", UNTOUCHED),
    (BEFORE, "notify(ctx, ctx.bars.c_consumer.index(wg))", UNTOUCHED),
    (BEFORE, "notify(ctx, ctx.bars.c_producer.index(wg)", UNTOUCHED),
    ("ttng.fence_async_shared", "    fence_async_shared()\n", "it makes new barriers visible to TMA: not modelled"),
    ("ttng.wait_barrier", "await_signal(ctx.bars.o_producer.index(wg), (n - 1) & 1)",
     "the commit of S also waits for the P·V before it, and the scale is sent after S has been read"),
    ("ttng.wait_barrier", "await_signal(ctx.bars.c_consumer.index(wg)",
     "this S was made after the P·V that the correction let go when it had read the scale before"),
    ("ttng.wait_barrier", "state = load_k(ctx, ring, state, key_tile, True)", FRESH),
    ("ttng.wait_barrier", "state = load_k(ctx, ring, state, key_tile, False)",
     "both chunks of K are given back after the same products"),
]  # fmt: skip
reason = reviewed(REDUNDANT)


@pytest.mark.full
def test_every_synchronisation_is_needed():
    case = Case(512, 128 * 11, spread=8.0)
    step, _ = case.step(case.inputs())

    def once(module, schedule) -> Report:
        return simulate(module, step.grid, step.args, schedule, step_limit=40_000, first_finding=True)

    results = knocked_out(compiled(step), once, reason)
    barriers = [found for found in results if not found.op.startswith("tcgen05.fence")]
    assert sum(found.noticed for found in barriers) > 0.8 * len(barriers)
    chunks = [
        found
        for found in results
        if reason(found) is not None and "load_k(ctx, ring, state, key_tile, False" in source(found)
    ]
    assert sorted(found.noticed for found in chunks) == [False, True], "one of the chunks' waits is needed"


def source(found: KnockOut) -> str:
    return "".join(linecache.getline(*frame) for frame in found.frames)


@pytest.mark.full
def test_code_is_made_for_pairs():
    """Loads and products of two CTAs and commits to both; the count of products follows from the config."""
    case = Case(512, 256, mask=Causal())
    step, _ = case.step(case.inputs())
    kernel = compiler.compiled(step)
    config = step.key[0]
    text = kernel.asm["ptx"]
    for name in ("tcgen05.mma", "tcgen05.commit", "complete_tx::bytes"):
        lines = [line for line in text.splitlines() if name in line]
        assert lines and all("cta_group::2" in line for line in lines), name
    commits = [line for line in text.splitlines() if "tcgen05.commit" in line]
    assert all("multicast::cluster" in line for line in commits)
    counts = opcode_counts(kernel.asm["cubin"])
    assert counts["UTCHMMA"] == 4 * (config.padded_qk_depth // 16 + config.BN // 16)
    assert ".reqnctapercluster 2" in text, "so a launch needs no attribute, only a grid in CTAs"
    boxes = [tuple(about["block_size"]) for about in kernel.metadata.tensordesc_meta]
    assert boxes == [(1, 128, 1, 64), (1, 64, 1, 64), (1, 128, 1, 64), (1, 128, 1, 64)], "of one CTA"
    used = resources(kernel.asm["cubin"])
    assert config.smem_used <= kernel.metadata.shared <= min(config.smem_used + 512, SMEM_LIMIT)
    assert kernel.metadata.tmem_size == config.tmem_used
    assert used.stack <= 16, "of scalars that all roles share"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(100, 100, dim=64), "head dim is 64; a pair of CTAs takes 65 to 128"),
        (Case(100, 100, dim=128, dim_v=64), "pairs of CTAs need them padded alike"),
    ],
)
def test_what_pairs_do_not_take_is_refused(case, message):
    with pytest.raises(AttentionError, match=message):
        case.step(case.inputs())
