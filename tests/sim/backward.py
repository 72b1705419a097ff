"""Runs the project's backward kernels in the simulator: the host side of their launches, without a GPU."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tests.oracle import Inputs, plain
from warpattn.kernels.cdna.backward import config as cdna
from warpattn.kernels.cdna.backward.launch import list_backward_launches as cdna_launches
from warpattn.kernels.sm90.backward import config as sm90
from warpattn.kernels.sm90.backward.launch import list_backward_launches as sm90_launches
from warpattn.kernels.sm100.backward import config as sm100
from warpattn.kernels.sm100.backward.launch import list_backward_launches as sm100_launches
from warpattn.masks import Mask
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.backward import CheckedBackward, Gradients, fitted_gradients, write_back
from warpattn.problem.launch import Launch
from warpattn.reference import reference
from warpattn.runtime.simulate import Options, run_launch
from warpattn.runtime.training.plan import list_captured_launches
from warpattn.scores import Score
from warpattn.sequences import Dense, Ragged, Sequence
from warpattn.sim import Report

KERNELS = {"sm90": (sm90.choose, sm90_launches), "sm100": (sm100.choose, sm100_launches)}
KERNELS |= dict.fromkeys(("gfx942", "gfx950"), (cdna.choose, cdna_launches))
MANY = 16384
LIMIT = 2.0  # times the error of the same gradients in the operands' own dtype, as in `tests/oracle.py`


@dataclass(frozen=True)
class Case:
    """A problem, small, in one dtype."""

    seq_q: int
    seq_k: int
    heads: int = 1
    heads_kv: int = 1
    dim: int = 64
    dim_v: int = 0
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    mask: Mask | None = None
    score: Score | None = None
    sinks: bool = False
    scale: float | None = None
    dlse: bool = False
    deterministic: bool = False
    limit: float = LIMIT
    section: int = 0  # heads whose key tiles are numbered together; 0: the plan's
    at_once: int = 0  # CTAs that run at once, with a section; 0: the plan's
    lengths: tuple[tuple[int, int], ...] = ()  # queries and keys of each sequence, where they are end to end
    arch: str = "sm90"
    long: bool = False  # with the tiles of many queries and keys

    @property
    def sequence(self) -> Sequence:
        if not self.lengths:
            return Dense()
        offsets = [torch.tensor([0, *accumulate(part)], dtype=torch.int32) for part in zip(*self.lengths, strict=True)]
        return Ragged(*offsets)

    def inputs(self, draw_number: int = 0) -> dict[str, Tensor]:
        """q, k, v, dout and, if the case has them, sinks and dlse."""
        generator = torch.Generator().manual_seed(self.seq_q + 7 * self.seq_k + 1000 * draw_number)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator)

        dim_v = self.dim_v or self.dim
        batch = () if self.lengths else (self.batch,)
        lengths = self.lengths or ((self.seq_q, self.seq_k),)
        rows, keys = (sum(part) for part in zip(*lengths, strict=True))
        made = {
            "q": draw(*batch, rows, self.heads, self.dim),
            "k": draw(*batch, keys, self.heads_kv, self.dim),
            "v": draw(*batch, keys, self.heads_kv, dim_v),
            "dout": draw(*batch, rows, self.heads, dim_v),
        }
        made = {name: x.to(self.dtype) for name, x in made.items()}
        if self.sinks:
            made["sinks"] = draw(self.heads)
        if self.dlse:
            made["dlse"] = draw(*batch, self.heads, rows)
        return made


def gradients(case: Case, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of the plain formulas in `dtype` by autograd, and the forward's results."""
    leaves = {name: inputs[name].to(dtype).requires_grad_() for name in ("q", "k", "v", "sinks") if name in inputs}
    out, lse = reference(
        leaves["q"], leaves["k"], leaves["v"], mask=case.mask, score=case.score, sinks=leaves.get("sinks"),
        scale=case.scale, dtype=dtype, sequence=case.sequence,
    )  # fmt: skip
    roots, seeds = [out], [inputs["dout"].to(dtype)]
    if case.dlse:
        roots.append(torch.where(lse.isinf(), 0.0, lse))
        seeds.append(inputs["dlse"].to(dtype))
    made = torch.autograd.grad(roots, list(leaves.values()), seeds, allow_unused=True)
    pairs = zip(leaves.items(), made, strict=True)
    found = {f"d{name}": torch.zeros_like(x) if g is None else g for (name, x), g in pairs}
    return found | {"out": out.detach(), "lse": lse.detach()}


def checked(case: Case, inputs: dict[str, Tensor]) -> CheckedCall:
    """The forward's checked call."""
    call = Call(
        inputs["q"], inputs["k"], inputs["v"], case.sequence, case.mask, case.score, inputs.get("sinks"), case.scale,
        True, None, f"simulate:{case.arch}",
    )  # fmt: skip
    return validate(call)


def operands(case: Case, inputs: dict[str, Tensor], truth: dict[str, Tensor]) -> Gradients:
    """The tensors of the call; gradients begin as NaN."""
    nan = {name: torch.full_like(inputs[name], torch.nan) for name in ("q", "k", "v")}
    return Gradients(
        inputs["q"], inputs["k"], inputs["v"], truth["out"].to(case.dtype), truth["lse"].float(), inputs["dout"],
        inputs.get("dlse"), inputs.get("sinks"), nan["q"], nan["k"], nan["v"],
        torch.full((case.heads,), torch.nan) if case.sinks else None,
    )  # fmt: skip


def launches(case: Case, x: Gradients, inputs: dict[str, Tensor]) -> tuple[Launch, ...]:
    """The launches of a case on fitted tensors."""
    forward = checked(case, inputs)
    choose, list_backward_launches = KERNELS[case.arch]
    choice = choose(forward.problem, ARCHS[case.arch], case.deterministic)
    if case.long:
        many = replace(forward.problem, seq_q=MANY, seq_k=MANY)
        choice = replace(choice, config=choose(many, ARCHS[case.arch], case.deterministic).config)
    if case.section and choice.order is not None:
        order = replace(choice.order, section=case.section, at_once=case.at_once or choice.order.at_once)
        choice = replace(choice, order=order)
    backward = CheckedBackward.of(forward, case.deterministic)
    return list_backward_launches(backward, x, case.sequence, choice)


def launches_of(case: Case) -> tuple[Launch, ...]:
    """The launches of a case, none of which runs."""
    inputs = case.inputs()
    return launches(case, fitted_gradients(operands(case, inputs, gradients(case, inputs, torch.float64))), inputs)


def captured_launch(case: Case) -> Launch:
    """The launch that takes gradients of what the score of a case captured."""
    inputs = case.inputs()
    forward = checked(case, inputs)
    x = fitted_gradients(operands(case, inputs, gradients(case, inputs, torch.float64)))
    sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in forward.score.tensors]
    wanted = [True] * len(sums)
    (launch,) = list_captured_launches(CheckedBackward.of(forward, False), x, case.sequence, wanted, sums)
    return launch


def simulated(case: Case, **options: Any) -> tuple[list[Report], dict[str, float], Tensor]:
    """(a report for each launch; for each gradient its error in units of what is allowed; dq)."""
    inputs = case.inputs()
    truth = gradients(case, inputs, torch.float64)
    x = operands(case, inputs, truth)
    fitting = fitted_gradients(x)
    reports = [run_launch(launch, Options(**options)) for launch in launches(case, fitting, inputs)]
    write_back(fitting, x)
    allowed = tolerances(case, inputs, truth)
    made = {"dq": x.dq, "dk": x.dk, "dv": x.dv} | ({"dsinks": x.dsinks} if case.sinks else {})
    return reports, {name: error(tensor, truth[name]) / allowed[name] for name, tensor in made.items()}, x.dq


def check_right(case: Case, **options: Any) -> None:
    """Assert that no launch of a case has a finding and no gradient an error above what is allowed."""
    reports, errors, _ = simulated(case, **options)
    assert all(report.clean for report in reports), reports
    assert all(error <= 1 for error in errors.values()), errors


def tolerances(case: Case, inputs: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """The largest error allowed for each gradient: `limit` times that of the plain formulas with every step rounded to
    the operands' dtype, and a rounding."""
    rough = plain_gradients(case, inputs, case.dtype)
    return {
        name: case.limit * (rough[name].double() - x).abs().max().item() + 2e-3 * x.abs().max().item() + 1e-6
        for name, x in truth.items() if name in rough
    }  # fmt: skip


def plain_gradients(case: Case, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of the score matrix written plainly, in `dtype` throughout."""
    leaves = {name: inputs[name].to(dtype).requires_grad_() for name in ("q", "k", "v")}
    sinks = inputs["sinks"].clone().requires_grad_() if case.sinks else None
    given = Inputs(
        leaves["q"], leaves["k"], leaves["v"], case.sequence, case.mask, case.score, sinks, case.scale
    )
    out, lse = plain(given, dtype)
    loss = (out * inputs["dout"].to(dtype)).sum()
    if case.dlse:
        loss = loss + (torch.where(lse.isinf(), 0.0, lse) * inputs["dlse"].to(lse.dtype)).sum()
    loss.backward()
    found = {f"d{name}": x.grad for name, x in leaves.items()} | ({"dsinks": sinks.grad} if case.sinks else {})
    return {name: x.nan_to_num(nan=0.0) for name, x in found.items()}


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference; NaN counts as infinitely much."""
    return (actual.double() - expected).abs().nan_to_num(nan=float("inf")).max().item()
