"""The Blackwell kernels under the whole product: masks x {dense, ragged, paged} x heads x odd lengths x schedules.

      masks         every one of tests/cases.py, with rows and key tiles that see nothing
      layouts       dense: a launch for each pair of lengths; ragged: all pairs, and sequences without queries or
                    without keys, in one launch; paged: several key lengths and none in a launch, for each number of
                    queries
      heads         1, 4 or 8 query heads to a key head, of which there are two where that is cheap
      lengths       1, 2, 63, 64, 65, 127, 129, 1000, of queries and of keys
      schedules     eager, lazy, adversarial, 20 random ones

Two query tiles a CTA (2Q) take all of it; one query tile (1Q), whole and with its keys split, a cover of the masks.
What must not be read is NaN: rows behind dense operands, keys of ragged sequences without queries, pages of no sequence
and the tails of last pages. Values are held against the tolerance rule once a problem; under every other schedule
they must be the same, bit for bit.

Run a part by hand: `pytest -n 0 -m full tests/full/test_sm100_product.py -k "2q-paged and g8"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.cases import MASKS, Case
from tests.oracle import Inputs, check, poisoned
from warpattn.kernels.sm100.prefill_1q.config import choice_of, choose_1q
from warpattn.kernels.sm100.prefill_2q.config import choose_2q, prefill_config
from warpattn.kernels.sm100.select import launches_of_choice
from warpattn.problem import Call, CheckedCall, Problem, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, fitted
from warpattn.runtime.simulate import Options, run_launch

pytestmark = pytest.mark.full

LENGTHS = (1, 2, 63, 64, 65, 127, 129, 1000)
PAIRS = tuple((q, LENGTHS[(i + 3) % len(LENGTHS)]) for i, q in enumerate(LENGTHS))  # the longest meets short ones
PAGED = (
    (1, (1, 2, 63, 0, 64, 65, 127, 129, 1000)),
    (2, (129, 1)),
    (63, (1000, 63)),
    (64, (64, 0, 127)),
    (65, (2, 65)),
    (127, (1, 2, 63, 0, 64, 65, 127, 129)),
    (129, (1000, 129)),
    (1000, (65,)),
)
GROUPS = (1, 4, 8)
PAGES = (16, 64, 1, 8, 48, 256, 20, 128)
SCHEDULES = [("lazy", 0), ("eager", 0), ("adversarial", 0), *(("random", seed) for seed in range(1, 21))]
FEW_MASKS = ("none", "causal", "window-both", "prefix-each", "dense-mask", "causal-documents", "custom", "nothing")
PARTS = (1, 2, 4, 8, 16)
ENDLESS = replace(ARCHS["sm100"], processors=10**6)  # no problem fills such a chip with two query tiles a CTA


@dataclass(frozen=True)
class Product:
    """One compiled kernel of the product and all its lengths; `parts` of the keys, 0 for two query tiles a CTA."""

    kind: str
    mask: str
    group: int
    number: int  # of the mask, from which follows what takes turns: head dims, page sizes, dtypes, sinks
    parts: int = 0

    @property
    def name(self) -> str:
        kernel = "2q" if self.parts == 0 else "1q" if self.parts == 1 else f"split{self.parts}"
        return f"{kernel}-{self.kind}-g{self.group}-{self.mask}"

    def cases(self) -> Iterator[Case]:
        """The problems of this kernel, with every length among queries and among keys."""
        turn = self.number + GROUPS.index(self.group)
        base = Case(
            kind=self.kind, batch=1, heads_q=self.group, heads_kv=1, dim=128 if turn % 4 == 3 else 64, mask=self.mask,
            dtype=(torch.bfloat16, torch.float16)[turn % 2], sinks=turn % 3 == 1,
        )  # fmt: skip
        if self.kind == "dense":
            for q, k in PAIRS:
                heads = 2 if max(q, k) < 1000 else 1
                yield replace(base, seq_q=q, seq_k=k, heads_q=self.group * heads, heads_kv=heads)
        elif self.kind == "ragged":
            queries, keys = zip(*PAIRS[:4], (0, 65), *PAIRS[4:], (129, 0), strict=True)
            yield replace(base, batch=len(queries), lens_q=queries, lens_k=keys)
        else:
            for q, keys in PAGED:
                yield replace(base, batch=len(keys), seq_q=q, lens_k=keys, page_size=PAGES[turn % len(PAGES)])

    def choice(self, problem: Problem) -> Choice:
        if self.parts == 0:
            return choose_2q(problem)
        one = choose_1q(problem, prefill_config(problem)[0], ENDLESS)
        assert one is not None
        return choice_of(problem, replace(one.config, splitk_partitions=self.parts))


def products() -> Iterator[Product]:
    """Every kernel."""
    names = list(MASKS)
    for kind in ("dense", "ragged", "paged"):
        for group in GROUPS:
            yield from (Product(kind, mask, group, number) for number, mask in enumerate(names))
    for kind in ("dense", "paged"):
        for group in GROUPS:
            for i, mask in enumerate(FEW_MASKS):
                yield Product(kind, mask, group, i, 1)
                yield Product(kind, mask, group, i, PARTS[1 + (i + group) % 4])


@pytest.mark.parametrize("product", [pytest.param(product, id=product.name) for product in products()])
def test_values_and_no_findings(product: Product) -> None:
    for case in product.cases():
        inputs = guarded(case.build("cpu"))
        expected: tuple[Tensor, Tensor] | None = None
        for schedule, seed in SCHEDULES:
            steps, results = launches(product, inputs)
            for step in steps:
                report = run_launch(step, Options(schedule, seed))
                assert report.clean, f"{case.name} {schedule} {seed}: {report}"
            if expected is None:
                check(inputs, *results)
                expected = results
            same = all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
            assert same, f"{case.name}: {schedule} {seed} has other bits than {SCHEDULES[0][0]}"


def launches(product: Product, x: Inputs) -> tuple[tuple[Launch, ...], tuple[Tensor, Tensor]]:
    """The launches of a problem, and the poisoned outputs that they fill."""
    call = Call(x.q, x.k, x.v, x.sequence, x.mask, x.score, x.sinks, x.scale, True, None, "simulate:sm100")
    ready: CheckedCall = validate(call)
    out = poisoned((*x.q.shape[:-1], x.v.shape[-1]), x.q.dtype)
    lse = poisoned(ready.lse_shape, torch.float32)
    operands = fitted(Operands(x.q, x.k, x.v, out, lse, x.sinks))
    assert operands.out is out
    steps = launches_of_choice(ready, operands, x.sequence, product.choice(ready.problem))
    if product.parts > 1:
        steps[0].args["o_desc"].fill_(torch.nan)
        steps[0].args["lse_ptr"].view(torch.float32).fill_(torch.nan)  # packed denominators
    return steps, (out, lse)


def guarded(x: Inputs) -> Inputs:
    """The inputs with NaN that must not be read: behind dense operands, in keys of ragged sequences without queries.
    Pages have it already."""
    if x.sequence.kind == "paged":
        return replace(x, q=among_nan(x.q, 1))
    if x.sequence.kind == "dense":
        return replace(x, q=among_nan(x.q, 1), k=among_nan(x.k, 1), v=among_nan(x.v, 1))
    starts, keys = x.sequence.cu_q.tolist(), x.sequence.cu_k.tolist()
    for b in range(len(starts) - 1):
        if starts[b] == starts[b + 1]:
            x.k[keys[b] : keys[b + 1]] = torch.nan
            x.v[keys[b] : keys[b + 1]] = torch.nan
    return replace(x, q=among_nan(x.q, 0), k=among_nan(x.k, 0), v=among_nan(x.v, 0))


def among_nan(x: Tensor, rows: int) -> Tensor:
    """The same numbers as a view: 130 rows of NaN lie before and behind those of dimension `rows`."""
    size = x.shape[rows]
    wide = x.new_full((*x.shape[:rows], size + 260, *x.shape[rows + 1 :]), torch.nan)
    view = wide.narrow(rows, 130, size)
    view.copy_(x)
    return view
