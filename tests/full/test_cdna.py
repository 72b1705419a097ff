"""The CDNA kernels: every mask and score x dense, ragged, paged x prefill, decode x group x schedule, on both chips.

One ragged or paged call holds sequences of every odd length; a dense test goes through them one by one. Head dims,
dtypes, page sizes and sinks change from test to test, so that a kernel is compiled once for each. Unused rows of pages
hold NaN, unused entries of tables point nowhere, and there are sequences, tiles and rows without a key.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.cases import MASKS, SCORES, Case
from tests.oracle import check, poisoned
from warpattn.problem import Call, validate
from warpattn.problem.operands import Operands
from warpattn.runtime.simulate import Options, traced

pytestmark = pytest.mark.full

ARCHS = ("gfx942", "gfx950")
GROUPS = (1, 4, 8)
LENGTHS = (1, 2, 63, 64, 65, 127, 129, 1000)
SCHEDULES = [("eager", 0), ("lazy", 0), ("adversarial", 0), *(("random", seed) for seed in range(3))]
# (head dim of Q and K, of V, dtype): powers of two, padded ones, and a V of its own.
DIMS = ((64, 0, torch.bfloat16), (72, 0, torch.float16), (128, 0, torch.bfloat16), (40, 64, torch.bfloat16),
        (64, 0, torch.float16), (128, 72, torch.float16))  # fmt: skip
PAGES = (1, 3, 16, 32, 64, 100, 128, 256, 512)
TOKENS = {1: 1, 4: 3, 8: 16}  # of a decode step, by group


def dense_prefill(base: Case) -> list[Case]:
    """More queries than keys, as many, and fewer; queries and keys of every length that is no decode."""
    queries = (64, 1000, 17, 65, 127, 63, 129, 127)
    return [replace(base, batch=1, seq_q=q, seq_k=k) for q, k in zip(queries, LENGTHS, strict=True)]


def dense_decode(base: Case) -> list[Case]:
    tokens = TOKENS[base.heads_q // base.heads_kv]
    return [replace(base, seq_q=tokens, seq_k=k) for k in LENGTHS]


def ragged(base: Case) -> list[Case]:
    """Every length as queries and as keys, together and apart; none of either."""
    queries, keys = (*LENGTHS, 5, 0, 129), (*reversed(LENGTHS), 0, 7, 129)
    return [replace(base, kind="ragged", batch=len(keys), lens_q=queries, lens_k=keys)]


def paged_prefill(base: Case) -> list[Case]:
    return [_paged(base, 65)]


def paged_decode(base: Case) -> list[Case]:
    return [_paged(base, TOKENS[base.heads_q // base.heads_kv])]


def _paged(base: Case, queries: int) -> Case:
    size = PAGES[zlib.crc32(f"{base.name} pages".encode()) % len(PAGES)]
    return replace(base, kind="paged", batch=len(LENGTHS) + 1, seq_q=queries, lens_k=(*LENGTHS, 0), page_size=size)


LAYOUTS: dict[str, Callable[[Case], list[Case]]] = {
    "dense-prefill": dense_prefill, "dense-decode": dense_decode, "ragged": ragged,
    "paged-prefill": paged_prefill, "paged-decode": paged_decode,
}  # fmt: skip
every = pytest.mark.parametrize("layout", LAYOUTS)
both = pytest.mark.parametrize("arch", ARCHS)


def base_case(group: int, mask: str, score: str, layout: str) -> Case:
    """The problem without its lengths; what it does not say comes from its name."""
    number = zlib.crc32(f"{group} {mask} {score} {layout}".encode())
    dim, dim_v, dtype = DIMS[number % len(DIMS)]
    sinks = number // len(DIMS) % 2 == 1
    return Case(heads_q=group, heads_kv=1, dim=dim, dim_v=dim_v, dtype=dtype, mask=mask, score=score, sinks=sinks)


@both
@every
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(arch: str, layout: str, group: int, mask: str) -> None:
    for case in LAYOUTS[layout](base_case(group, mask, "none", layout)):
        run(case, arch)


@both
@every
@pytest.mark.parametrize("mask", ["causal", "documents"])
@pytest.mark.parametrize("score", [name for name in SCORES if name != "none"])
def test_every_score(arch: str, layout: str, mask: str, score: str) -> None:
    for case in LAYOUTS[layout](base_case(4, mask, score, layout)):
        run(case, arch)


@both
@every
def test_several_key_heads(arch: str, layout: str) -> None:
    base = base_case(4, "window", "none", layout)
    for case in LAYOUTS[layout](replace(base, heads_q=12, heads_kv=3)):
        run(case, arch)


def run(case: Case, arch: str) -> None:
    """Values by the rule of the oracle, the same bits under every schedule, and no findings."""
    x = case.build("cpu")
    ready = validate(Call(x.q, x.k, x.v, x.sequence, x.mask, x.score, x.sinks, x.scale, True, None, f"simulate:{arch}"))
    given = tuple(x.sequence.operands(x.q, x.k, x.v).values())
    first: tuple[torch.Tensor, ...] = ()
    for schedule, seed in SCHEDULES:
        out = poisoned((*x.q.shape[:-1], ready.problem.dim_v), x.q.dtype)
        lse = poisoned(ready.lse_shape, torch.float32)
        report = traced(ready, Operands(*given, out, lse, x.sinks), Options(schedule, seed), x.sequence)
        assert report.clean, f"{case.name} {schedule} {seed}: {report}"
        if not first:
            check(x, out, lse)
            first = (out, lse)
        assert all(map(torch.equal, first, (out, lse))), f"{case.name} {schedule} {seed} differs from eager"
