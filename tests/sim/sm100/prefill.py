"""Runs the project's Blackwell prefill kernel in the simulator: the host side of a launch, without a GPU."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpattn.kernels.sm100 import signature
from warpattn.kernels.sm100.config import FA4Config
from warpattn.kernels.sm100.sequence_args import Shape, recompute_args, sequence_args
from warpattn.kernels.sm100.traits import Traits
from warpattn.language.nodes import Program
from warpattn.masks import Full, Mask
from warpattn.problem.arch import triton_target
from warpattn.problem.element import element_of
from warpattn.problem.operands import Operands, flat
from warpattn.reference import reference
from warpattn.scores import Score
from warpattn.sequences import Dense
from warpattn.sim import Report, simulate
from warpattn.sim.compile import to_ttgir

_built: dict[Any, Any] = {}


@dataclass(frozen=True)
class Case:
    """A dense problem: small, in one dtype."""

    seq_q: int
    seq_k: int
    heads: int = 2
    heads_kv: int = 2
    dim: int = 64
    dim_v: int = 0
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    mask: Mask = Full()  # noqa: RUF009  frozen
    score: Score | None = None
    sinks: bool = False
    growth: float = 0  # how much larger the first key is, which is visited last: makes the reference maximum move

    @property
    def config(self) -> FA4Config:
        dims = (self.dim, self.dim_v or self.dim)
        return FA4Config(element_of(self.dtype), *dims, group=self.heads // self.heads_kv).gluon()[0]

    @property
    def traits(self) -> Traits:
        return Traits("dense", self.heads // self.heads_kv, self.sinks, True)

    def kernel(self) -> Any:
        """The kernel down to TTGIR; each is compiled once."""
        mask, score = self.programs()
        key = (self.config, self.traits, mask.key, None if score is None else score.key)
        if key not in _built:
            args = self.arguments(self.empty())
            source = signature.prefill_source(args, self.config, self.traits, mask, score)
            _built[key] = to_ttgir(source, triton_target("sm100"), self.config.options)
        return _built[key]

    def programs(self) -> tuple[Program, Program | None]:
        mask = self.mask.program()
        score = None if self.score is None else self.score.program()
        programs = Program((mask.keep, *mask.span), mask.tensors)
        return programs, None if score is None else Program((score.out,), score.tensors)

    def arguments(self, x: Operands) -> dict[str, Any]:
        """Of the launch."""
        mask, score = self.programs()
        return sequence_args(x, Dense(), self.config) | {
            "lse_ptr": x.lse, "sinks_ptr": x.sinks, "scale": self.dim**-0.5,
            "shape": Shape(self.seq_q, self.seq_k, self.heads, self.grid[0]),
            "recompute_args": recompute_args(mask.outputs[0], x, self.config),
            "mask_args": flat(mask.tensors), "score_args": flat(() if score is None else score.tensors),
        }  # fmt: skip

    def empty(self) -> Operands:
        """Operands with the types of the call's."""
        x, fp32 = torch.empty(1, 1, 1, 8, dtype=self.dtype), torch.empty(0)
        return Operands(x, x, x, x, fp32, fp32)

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v, sinks."""
        q = torch.randn(self.batch, self.seq_q, self.heads, self.dim).to(self.dtype)
        growing = 1 + self.growth * (1 - torch.arange(self.seq_k) / self.seq_k)
        k = (torch.randn(self.batch, self.seq_k, self.heads_kv, self.dim) * growing[:, None, None]).to(self.dtype)
        v = torch.randn(self.batch, self.seq_k, self.heads_kv, self.dim_v or self.dim).to(self.dtype)
        return q, k, v, torch.randn(self.heads) if self.sinks else None

    @property
    def grid(self) -> tuple[int, int, int]:
        heads = self.heads_kv if self.config.fuse_gqa else self.heads
        return -(-self.seq_q // self.config.BM_eff), heads, self.batch


def simulated(case: Case, kernel: Any = None, **options: Any) -> tuple[Report, float, float]:
    """(report, largest error of the output, of the LSE) against the reference."""
    q, k, v, sinks = case.operands()
    out = torch.full((case.batch, case.seq_q, case.heads, v.shape[3]), float("nan"), dtype=case.dtype)
    lse = torch.full((case.batch, case.heads, case.seq_q), float("nan"))
    args = case.arguments(Operands(q, k, v, out, lse, sinks))
    report = simulate(case.kernel() if kernel is None else kernel, case.grid, args, **options)
    expected, expected_lse = reference(q, k, v, mask=case.mask, score=case.score, sinks=sinks)
    return report, error(out.float(), expected), error(lse, expected_lse)


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference; equal infinities differ by nothing, NaN by infinitely much."""
    same = actual == expected
    return torch.where(same, 0.0, (actual - expected).abs()).nan_to_num(nan=float("inf")).max().item()
