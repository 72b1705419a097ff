"""Runs the project's Hopper prefill kernel in the simulator: the host side of a launch, without a GPU."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from warpattn.kernels.sm90.arguments import PrefillShape
from warpattn.kernels.sm90.prefill.config import SM90Config, TileShape, choose_config, with_tile
from warpattn.kernels.sm90.prefill.query_maps import query_maps
from warpattn.kernels.sm90.prefill.signature import prefill_source
from warpattn.language.nodes import Program
from warpattn.masks import Full, Mask
from warpattn.problem.arch import compile_options, triton_target
from warpattn.problem.element import element_of
from warpattn.problem.operands import Features, Operands, flat
from warpattn.reference import reference
from warpattn.runtime.simulate import tensors_in
from warpattn.scores import Score
from warpattn.sim import DependentGrid, Report, simulate
from warpattn.sim.compile import to_ttgir

_built: dict[Any, Any] = {}


@dataclass(frozen=True)
class Case:
    """A problem: B 1, small, in one dtype."""

    seq_q: int
    seq_k: int
    heads: int = 2
    heads_kv: int = 2
    dim: int = 64
    dim_v: int = 0
    dtype: torch.dtype = torch.bfloat16
    mask: Mask = Full()  # noqa: RUF009  frozen
    score: Score | None = None
    sinks: bool = False
    long: bool = False  # the config of long sequences
    packed: int = 1  # query heads of a tile
    block_n: int = 0  # keys of a tile; 0: those of the config
    consumers: int = 0  # warpgroups of a tile; 0: those of the config

    @property
    def config(self) -> SM90Config:
        rows = 16384 if self.long else self.seq_q
        config = choose_config(element_of(self.dtype), self.dim, self.dim_v or self.dim, rows, True)[0]
        if self.consumers:
            other = with_tile(config, TileShape(self.consumers, config.block_n))
            assert other is not None
            config = other
        return replace(config, packed=self.packed, block_n=self.block_n or config.block_n)

    def kernel(self) -> Any:
        """The kernel down to TTGIR; each is compiled once."""
        mask, score = self.programs()
        key = (self.config, mask.key, None if score is None else score.key, self.sinks)
        if key not in _built:
            features = Features(mask, score, self.sinks, True, split_keys=True)
            source = prefill_source(self.arguments(self.empty()), self.config, features)
            _built[key] = to_ttgir(source, triton_target("sm90"), compile_options())
        return _built[key]

    def programs(self) -> tuple[Program, Program | None]:
        mask = self.mask.program()
        score = None if self.score is None else self.score.program()
        programs = Program((mask.keep, *mask.span), mask.tensors)
        return programs, None if score is None else Program((score.out,), score.tensors)

    def arguments(self, x: Operands) -> dict[str, Any]:
        """Of the launch."""
        config, (mask, score) = self.config, self.programs()
        m_tiles, group = -(-self.seq_q // config.tokens), self.heads // self.heads_kv
        heads = {} if config.rows % config.packed == 0 else query_maps(x.q, x.out, config)
        return {
            "q_maps": (x.q,) * len(config.qk_parts), "k_maps": (x.k,) * len(config.qk_parts),
            "v_maps": (x.v,) * len(config.v_parts), "o_maps": (x.out,) * len(config.store_parts), **heads,
            "lse_ptr": x.lse, "sinks_ptr": x.sinks, "counter_ptr": torch.zeros(1, dtype=torch.int32),
            "scale": self.dim**-0.5,
            "shape": PrefillShape(self.seq_q, self.seq_k, self.heads, group, m_tiles, self.heads, self.heads),
            "mask_args": flat(mask.tensors), "score_args": flat(() if score is None else score.tensors),
        }  # fmt: skip

    def empty(self) -> Operands:
        """Operands with the types of the call's."""
        x, fp32 = torch.empty(0, dtype=self.dtype), torch.empty(0)
        return Operands(x, x, x, x, fp32, fp32)

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v, sinks."""
        q = torch.randn(1, self.seq_q, self.heads, self.dim).to(self.dtype)
        k = torch.randn(1, self.seq_k, self.heads_kv, self.dim).to(self.dtype)
        v = torch.randn(1, self.seq_k, self.heads_kv, self.dim_v or self.dim).to(self.dtype)
        return q, k, v, torch.randn(self.heads) if self.sinks else None


def simulated(case: Case, programs: int = 2, kernel: Any = None, **options: Any) -> tuple[Report, float, float]:
    """(report, largest error of the output, of the LSE) against the reference."""
    q, k, v, sinks = case.operands()
    out = torch.full((1, case.seq_q, case.heads, v.shape[3]), float("nan"), dtype=case.dtype)
    lse = torch.full((1, case.heads, case.seq_q), float("nan"))
    args = case.arguments(Operands(q, k, v, out, lse, sinks))
    grid = min(programs, args["shape"].m_tiles * case.heads // case.packed)
    ordered = DependentGrid((grid,), tensors_in(args.values()))
    report = simulate(case.kernel() if kernel is None else kernel, ordered, args, **options)
    expected, expected_lse = reference(q, k, v, mask=case.mask, score=case.score, sinks=sinks)
    assert args["counter_ptr"].item() == 0 or not report.clean, "the tile counter is left as it was found"
    return report, error(out.float(), expected), error(lse, expected_lse)


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference; equal infinities differ by nothing, NaN by infinitely much."""
    same = actual == expected
    return torch.where(same, 0.0, (actual - expected).abs()).nan_to_num(nan=float("inf")).max().item()
