"""What ranks do in tests: values and gradients of a shared call against the formulas of the whole, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import warpattn as wa
import warpattn.distributed as wad
from tests.gradients import GradientsOf, check_gradients, weights
from tests.gradients import gradients as formulas
from tests.oracle import Inputs, check, plain

FLOAT = torch.float64


@dataclass
class Case:
    """A call that ranks share: shapes, and what `attention` takes beside tensors."""

    name: str
    rows: int = 48
    keys: int = 48
    heads: tuple[int, int] = (12, 6)
    sinks: bool = False
    dtype: torch.dtype = FLOAT
    placement: str = "zigzag"
    tail: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> Inputs:
        """The whole, the same on every rank."""
        make = torch.Generator().manual_seed(1)
        shapes = (self.rows, self.heads[0], 8), (self.keys, self.heads[1], 8), (self.keys, self.heads[1], 6)
        q, k, v = (torch.randn((2, *shape), generator=make, dtype=FLOAT).to(self.dtype) for shape in shapes)
        sinks = torch.randn(self.heads[0], generator=make, dtype=FLOAT).to(self.dtype) if self.sinks else None
        return Inputs(q, k, v, sinks=sinks, soft_cap=isinstance(self.tail.get("score"), wa.SoftCap), **self.tail)


def ids() -> Tensor:
    """Documents that end within chunks, other ones in each sequence."""
    return torch.tensor([[0] * 20 + [1] * 28, [7] * 5 + [3] * 20 + [9] * 23])


def cases() -> list[Case]:
    """Everything that a mask, a score or a shape can make of the blocks of a ring."""
    causal, bias = wa.Causal(), torch.linspace(-1, 1, 12 * 48 * 48, dtype=FLOAT).sin().view(12, 48, 48)
    added = torch.where(torch.arange(48) % 5 == 0, -torch.inf, 0.1).expand(1, 1, 48, 48).to(FLOAT)
    return [
        Case("full"),
        Case("causal", sinks=True, tail={"mask": causal}),
        Case("causal bf16", dtype=torch.bfloat16, sinks=True, tail={"mask": causal}),
        Case("causal fp16", dtype=torch.float16, sinks=True, tail={"mask": causal}),
        Case("window", sinks=True, tail={"mask": wa.SlidingWindow(9)}),
        Case("wide window", placement="contiguous", tail={"mask": wa.SlidingWindow(20, 3)}),
        Case("window of neighbours", placement="contiguous", sinks=True, tail={"mask": wa.SlidingWindow(9)}),
        Case("documents", tail={"mask": causal & wa.Document(ids()), "score": wa.SoftCap(2.0)}),
        Case("padding", tail={"mask": wa.Padding(torch.tensor([48, 11]))}),
        Case("top left", rows=24, tail={"mask": wa.Causal(top_left=True)}),
        Case("no keys", keys=0, sinks=True, tail={"mask": causal}),
        Case("no queries", rows=0, tail={"mask": causal}),
        Case("fewer queries", rows=24, sinks=True, tail={"mask": causal}),
        Case("more queries", keys=24, tail={"mask": causal}),
        Case("slopes", tail={"mask": causal, "score": wa.ALiBi(12)}),
        Case("slopes and all keys", tail={"score": wa.ALiBi(12) | wa.SoftCap(3.0)}),
        Case("one key head", heads=(12, 1), tail={"mask": causal & wa.Chunked(7)}),
        Case("key heads that ranks share", heads=(12, 4), tail={"mask": causal}),
        Case("bias", tail={"score": wa.Bias(bias.requires_grad_()), "mask": ~wa.SlidingWindow(5)}),
        Case("added", tail={"mask": wa.Materialized(added), "scale": 0.3}),
    ]


def shared(case: Case, attend: Callable[..., Any], group: Any = None) -> None:
    """Out, LSE and all gradients of a shared call."""
    inputs = case.inputs()
    dout, dlse = weights(inputs)
    cut, whole = (partial(way, group=group, placement=case.placement) for way in (wad.shard, wad.unshard))
    parts = [cut(x, 1).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_()
    captured = captured_of(inputs)
    out, lse = attend(*parts, sinks=sinks, placement=case.placement, return_lse=True, **case.tail)
    seen = torch.where(lse == -torch.inf, 0.0, lse)
    leaves = [*parts, *([] if sinks is None else [sinks]), *captured]
    found = torch.autograd.grad((out * cut(dout, 1)).sum() + (seen * cut(dlse, 2)).sum(), leaves)
    gradients = [*(whole(x, 1) for x in found[:3]), *(summed(x, group) for x in found[3:])]
    out, lse = whole(out.detach(), 1), whole(lse.detach(), 2)
    if dist.get_rank() == 0:
        of_sinks = None if sinks is None else gradients[3]
        more = tuple(gradients[len(gradients) - len(captured) :])
        held = GradientsOf(*gradients[:3], of_sinks, more)
        if case.dtype == FLOAT:
            compare_exactly(inputs, (out, lse), held, (dout, dlse))
        else:
            check(inputs, out, lse, truth_dtype=FLOAT)
            check_gradients(inputs, held, dout, dlse)


def compare_exactly(inputs: Inputs, results: tuple[Tensor, Tensor], found: GradientsOf, along: Any) -> None:
    """fp64 against the formulas in fp64: the same but for the order of sums of some dozens of terms."""
    truth, truths = plain(inputs, FLOAT), formulas(inputs, *along, FLOAT, captured_of(inputs))
    pairs = [*zip(results, truth, strict=True), *((x, truths.named()[name]) for name, x in found.named().items())]
    for mine, right in pairs:
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-12)


def captured_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """The captured tensors that require gradients."""
    tensors = () if inputs.score is None else inputs.score.program().tensors
    return tuple(x for x in tensors if x.requires_grad)


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum of all ranks' shares."""
    x = x.clone()
    groups = [group] if getattr(group, "ndim", 1) == 1 else [group.get_group(0), group.get_group(1)]
    for each in groups:
        dist.all_reduce(x, group=getattr(each, "get_group", lambda each=each: each)())
    return x


def ring(case: Case) -> None:
    """The case in a ring of all ranks."""
    shared(case, wad.ring_attention)


def ulysses(case: Case) -> None:
    """The case with heads exchanged for rows."""
    shared(case, wad.ulysses_attention)


def of_some(case: Case, ranks: int) -> None:
    """The case in a ring of the first ranks."""
    group = dist.new_group(list(range(ranks)))
    if dist.get_rank() < ranks:
        shared(case, partial(wad.ring_attention, group=group), group)
        if case.heads[0] % ranks == 0:
            shared(case, partial(wad.ulysses_attention, group=group), group)


def mesh(case: Case) -> None:
    """The case on a mesh of two by two."""
    grid = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    shared(case, partial(wad.mesh_attention, mesh=grid), grid)


def changed_between() -> None:
    """A mask's tensor that changes between forward and backward."""
    seen, (q, k, v) = torch.ones(8, dtype=torch.bool), torch.randn(3, 1, 4, 2, 8).requires_grad_()
    out = wad.ring_attention(q, k, v, mask=wa.CustomMask(lambda b, h, q, k, seen: seen[k], seen=seen))
    seen[3] = False
    with pytest.raises(wa.AttentionError, match=r"a tensor of the mask \(.*shape \(8,\)\) has been changed in place"):
        out.sum().backward()


def gathered(*parts: Tensor, mask: wa.Mask) -> Tensor:
    """A rank's rows of a call over all keys."""
    return wad.shard(wa.attention(*(wad.unshard(x, 1) for x in parts), mask=mask), 1)


def differentiated_again() -> None:
    """A penalty of gradients against that of the whole; rings and exchanges of heads refuse it."""
    whole = [x.requires_grad_() for x in torch.randn((3, 2, 8, 4, 6), dtype=FLOAT, generator=torch.Generator())]

    def penalised(attend: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
        loss = attend(*leaves, mask=wa.Causal()).square().sum()
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        penalty = torch.stack([x.square().sum() for x in gradients]).sum()
        return torch.autograd.grad(loss + penalty, leaves, allow_unused=True)

    parts, right = [wad.shard(x.detach(), 1).requires_grad_() for x in whole], penalised(wa.attention, whole)
    for part, expected in zip(penalised(gathered, parts), right, strict=True):
        torch.testing.assert_close(part, wad.shard(expected, 1), rtol=1e-10, atol=1e-11)
    for attend in (wad.ring_attention, wad.ulysses_attention):
        with pytest.raises(wa.AttentionError, match="are differentiated again"):
            penalised(attend, parts)


def jobs() -> list[Callable[[], None]]:
    """One case of every kind, and every way."""
    named = {case.name: case for case in cases()}
    rings = ("causal", "causal fp16", "window of neighbours", "no keys", "fewer queries", "one key head", "bias")
    return [
        *(partial(ring, named[name]) for name in rings),
        *(partial(ulysses, named[name]) for name in ("causal", "bias", "slopes")),
        partial(ulysses, named["key heads that ranks share"]),
        *(partial(of_some, named[name], 3) for name in ("causal bf16", "documents")),
        *(partial(of_some, named["causal"], ranks) for ranks in (1, 2)),
        partial(mesh, named["slopes"]),
        changed_between,
        differentiated_again,
    ]


def more_jobs() -> list[Callable[[], None]]:
    """Every case in rings and by heads, on one to four ranks and on a mesh."""
    made = cases()
    return [
        *(partial(way, case) for case in made for way in (ring, ulysses, mesh)),
        *(partial(of_some, case, ranks) for case in made for ranks in (1, 2, 3)),
    ]
