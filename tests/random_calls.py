"""Random calls: masks x scores x sinks x dtypes x layouts x lengths x special values, one call a seed.

A call keeps to what kernels of its architecture take, so none may refuse it. Finite results are held to the bound of
their dtype (`tests/oracle.py`), special values to the rule of docs/numbers.md (`tests/specials.py`). Hidden values that
are not finite are left to tests/sim/calls/test_numbers.py, since kernels differ there; hidden keys are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import warpattn as wa
from tests.cases import MASKS, SCORES, Case
from tests.oracle import Inputs, check, visible
from tests.specials import SPOILS, unlike
from warpattn.problem.backends import LIMITS

PLAIN = sorted(set(MASKS) - {"none", "added-mask", "causal-added"})  # what is combined with &, | and ~
HEADS = ((1, 1), (2, 1), (3, 3), (4, 2), (6, 2), (8, 1), (5, 1))
DIMS = (8, 16, 40, 64, 64, 64, 72, 80, 96, 100, 128, 128, 128, 160, 192, 256)
LENGTHS = (0, 1, 2, 7, 16, 17, 63, 64, 65, 100, 127, 128, 129, 150, 200, 257)
# Scores that stay exact where products are near the end of their dtype; docs/numbers.md says what Hopper does without.
LARGE = {"none", "softcap", "bias-softcap", "softcap-alibi", "custom"}
LAYOUTS = ("contiguous", "contiguous", "heads-first", "sliced", "unaligned")


class Drawn(NamedTuple):
    """A call, and what becomes of its tensors: "as drawn", "unseen keys", or a kind of `specials.SPOILS`."""

    case: Case
    how: str


def draw(arch: str, seed: int) -> Drawn:
    """The call of a seed."""
    chance = random.Random(f"{arch} {seed}")
    kind = chance.choice(("dense", "dense", "dense", "ragged", "ragged", "paged", "paged"))
    heads_q, heads_kv = chance.choice(HEADS)
    most = LIMITS[arch].max_dim
    dim = chance.choice([d for d in DIMS if d <= most])
    lengths = {} if kind == "dense" else {"lens_k": tuple(chance.choices(LENGTHS, k=chance.randint(1, 3)))}
    if kind == "ragged":
        lengths["lens_q"] = tuple(chance.choice(LENGTHS[:-2]) for _ in lengths["lens_k"])
    case = Case(
        kind=kind,
        batch=len(lengths.get("lens_k", "12"[: chance.randint(1, 2)])),
        seq_q=chance.choice(LENGTHS[1:-2] if kind == "dense" else (1, 1, 2, 5, 16, 40)),
        seq_k=chance.choice(LENGTHS),
        heads_q=heads_q,
        heads_kv=heads_kv,
        dim=dim,
        dim_v=chance.choice((0, 0, 0, 64)),
        dtype=chance.choice((torch.bfloat16, torch.float16)),
        mask=_mask(chance),
        score=chance.choice(sorted(SCORES)),
        sinks=chance.random() < 0.3,
        scale=chance.choice((None, None, 0.3, -0.2, 0.0)),
        page_size=chance.choice((1, 8, 16, 64, 100)) if kind == "paged" else 0,
        layout=chance.choice(LAYOUTS),
        **lengths,
    )
    how = chance.choice(("as drawn", "as drawn", "unseen keys", "visible", "large"))
    exact = case.score in LARGE - ({"none"} if arch == "sm90" else set()) and "added" not in case.mask
    return Drawn(case, how if exact or how != "large" else "as drawn")


def _mask(chance: random.Random) -> str:
    if chance.random() < 0.6:
        return chance.choice(sorted(MASKS))
    names = [chance.choice(("", "", "~")) + name for name in chance.sample(PLAIN, 2)]
    return chance.choice((" & ", " | ")).join(names)


def wrong(arch: str, drawn: Drawn) -> str:
    """What is wrong with the simulated kernels' result, or nothing."""
    x = _spoiled(drawn)
    result = attend(x, f"simulate:{arch}")
    if drawn.how in ("visible", "large"):
        return unlike(result, x, 0.02 if x.q.dtype == torch.float16 else 0.04)
    try:
        check(x, *result)
    except AssertionError as error:
        return str(error)
    return ""


def attend(x: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """(out, lse) of any kind of sequence."""
    tail = {"mask": x.mask, "score": x.score, "sinks": x.sinks, "scale": x.scale, "return_lse": True}
    if isinstance(x.sequence, wa.PagedKV):
        result = wa.attention_paged(x.q, x.sequence, **tail, backend=backend)
    elif isinstance(x.sequence, wa.Ragged):
        result = wa.attention_varlen(x.q, x.k, x.v, x.sequence, **tail, backend=backend)
    else:
        result = wa.attention(x.q, x.k, x.v, **tail, backend=backend)
    assert isinstance(result, tuple)
    return result


def _spoiled(drawn: Drawn) -> Inputs:
    inputs = drawn.case.build()
    if drawn.how == "unseen keys":
        for k, dark in _unseen(inputs):
            k[dark] = torch.nan
        return inputs
    return SPOILS[drawn.how](inputs, torch.Generator().manual_seed(len(drawn.case.name)))


def _unseen(inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each sequence and head the keys [Sk, D], and those that no row sees."""
    for b, (q, k, _) in enumerate(inputs.sequence.walk(inputs.q, inputs.k, inputs.v)):
        heads = k.shape[1]
        seen = visible(inputs, b, range(len(q)), len(q), len(k)).any(1).unflatten(0, (heads, -1)).any(1)  # [Hkv, Sk]
        yield from ((k[:, h], ~seen[h]) for h in range(heads))
