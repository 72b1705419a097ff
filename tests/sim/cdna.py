"""Runs the attention kernels of gfx942 and gfx950 in the simulator: problems as calls, their launches, the reference."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from warpattn.kernels.cdna.choose import choose, prefill_config
from warpattn.kernels.cdna.steps import steps
from warpattn.masks import Full, Mask
from warpattn.operands import Operands, fitted
from warpattn.problem import Call, Ready, examine
from warpattn.reference import reference
from warpattn.scores import Score
from warpattn.sequences import Dense, Sequence
from warpattn.sim import Report
from warpattn.simulated import Options, launch
from warpattn.step import Choice
from warpattn.target import ARCHS

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """A small problem."""

    seq_q: int
    seq_k: int
    heads: int = 2
    heads_kv: int = 1
    dim: int = 64
    dim_v: int = 0
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    mask: Mask = Full()  # noqa: RUF009  frozen
    score: Score | None = None
    sinks: bool = False
    scale: float | None = None

    def call(self) -> Call:
        """The dense problem with random operands."""
        q = torch.randn(self.batch, self.seq_q, self.heads, self.dim).to(self.dtype)
        k = torch.randn(self.batch, self.seq_k, self.heads_kv, self.dim).to(self.dtype)
        v = torch.randn(self.batch, self.seq_k, self.heads_kv, self.dim_v or self.dim).to(self.dtype)
        return self.on(q, k, v, Dense())

    def on(self, q: Tensor, k: Tensor, v: Tensor, sequence: Sequence) -> Call:
        """The call with operands of any sequence kind."""
        sinks = torch.randn(self.heads) if self.sinks else None
        return Call(q, k, v, sequence, self.mask, self.score, sinks, self.scale, True)


def ready_of(call: Call, arch: str) -> Ready:
    """The checked call, for the kernels of `arch`."""
    return replace(examine(replace(call, backend="reference")), backend=f"simulate:{arch}")


def prefill_choice(call: Call, arch: str, kind: str = "", **changes: Any) -> Choice:
    """A choice of the prefill kernel with other buffers than the planner's; `changes` to its config."""
    problem = ready_of(call, arch).problem
    name = "bf16" if problem.dtype == torch.bfloat16 else "fp16"
    config, _ = prefill_config(name, problem.dim_qk, problem.dim_v, arch, kind)
    return Choice("prefill", replace(config, **changes), (), (), ())


def decode_choice(call: Call, arch: str, partitions: int, **changes: Any) -> Choice:
    """The planner's choice with another number of partitions."""
    chosen = choose(ready_of(call, arch).problem, ARCHS[arch])
    return replace(chosen, partitions=partitions, config=replace(chosen.config, **changes))


def simulated(call: Call, arch: str, choice: Choice | None = None, **options: Any) -> tuple[Report, float, float]:
    """(report, largest error of the output relative to its tolerance, largest error of the LSE)."""
    ready = ready_of(call, arch)
    out, lse = outputs(call, ready)
    fitting = fitted(Operands(*call.sequence.operands(call.q, call.k, call.v).values(), out, lse, call.sinks))
    reports = [launch(step, Options(**options)) for step in steps(ready, fitting, call.sequence, choice)]
    main = max(reports, key=lambda report: report.steps)
    main.findings = [finding for report in reports for finding in report.findings]
    exact, exact_lse = reference(
        call.q,
        call.k,
        call.v,
        sequence=call.sequence,
        mask=call.mask,
        score=call.score,
        sinks=call.sinks,
        scale=call.scale,
    )
    return main, error(fitting.out.float(), exact), error(lse, exact_lse)


def outputs(call: Call, ready: Ready) -> tuple[Tensor, Tensor]:
    """Output and LSE, poisoned."""
    out = torch.full((*call.q.shape[:-1], ready.problem.dim_v), NAN, dtype=call.q.dtype)
    return out, torch.full(ready.lse_shape, NAN)


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference; equal infinities differ by nothing, NaN by infinitely much."""
    same = actual == expected
    difference = torch.where(same, 0.0, (actual - expected).abs())
    return difference.nan_to_num(nan=float("inf")).max().item() if difference.numel() else 0.0
