"""Random calls with more tiles than a card has SMs, beside the reference on the same card.

Small calls cannot show programs that were never launched. Every head of every batch entry or token is compared alone,
of ragged gradients every 64 tokens of a head.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import warpattn as wa

pytestmark = pytest.mark.gpu

SEEDS = range(16)
SCORES = 10**8  # at most, of a call: the reference keeps them in fp32
LENGTHS = (100, 129, 500, 729, 1024, 2048, 3000, 4096)
PAGED_LENGTHS = (1, 63, 1000, 4096, 20_000)
HEADS = ((8, 8), (16, 16), (32, 8), (64, 8), (28, 4), (48, 1))
DIMS = (40, 64, 64, 72, 80, 96, 128, 128, 128, 160, 192, 256)
VALUES = (0, 0, 0, 64, 128)  # other head dims of values
ERROR = 0.03  # of a head's norm; gradients have five products and a rounding more
ERROR_OF_GRADIENTS = 0.05
TILE = 64
NOISE = 0.01  # of each element, where a gradient is a difference that is nearly 0

Run = Callable[[Any, bool], tuple[Tensor, Tensor | None]]  # of a backend, and whether an LSE is returned


class Large(NamedTuple):
    """A call by its backend, and the tensors whose gradients are taken; `rows`: dimensions of one head's result."""

    text: str
    run: Run
    leaves: tuple[Tensor, ...]
    rows: tuple[int, ...]


def dense(chance: random.Random) -> Large:
    """`attention`, with every second one deterministic."""
    heads, heads_kv = chance.choice(HEADS)
    dim, keys = chance.choice(DIMS), chance.choice(LENGTHS)
    dim_v = chance.choice(VALUES) or dim
    queries = chance.choice((keys, keys, chance.choice(LENGTHS)))
    batch = max(1, min(16, SCORES // (heads * queries * keys)))
    dtype = chance.choice((torch.bfloat16, torch.float16))
    shapes = ((batch, queries, heads, dim), (batch, keys, heads_kv, dim), (batch, keys, heads_kv, dim_v))
    leaves = tuple(normal(shape, dtype).requires_grad_() for shape in shapes)
    terms = terms_of(chance, heads)

    def run(backend: Any, has_lse: bool) -> Any:
        return wa.attention(*leaves, **terms, return_lse=has_lse, backend=backend)

    return Large(f"{batch}x{queries}x{keys} {heads}/{heads_kv} {dim}/{dim_v} {terms}", run, leaves, (1, 3))


def ragged(chance: random.Random) -> Large:
    """`attention_varlen` of packed sequences."""
    heads, heads_kv = chance.choice(HEADS)
    dim, lengths = chance.choice(DIMS), [chance.choice((0, 17, *LENGTHS)) for _ in range(30)]
    while heads * sum(n * n for n in lengths) > SCORES:
        lengths.pop()
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    dtype = chance.choice((torch.bfloat16, torch.float16))
    leaves = tuple(normal((sum(lengths), h, dim), dtype).requires_grad_() for h in (heads, heads_kv, heads_kv))
    terms = terms_of(chance, heads)

    def run(backend: Any, has_lse: bool) -> Any:
        return wa.attention_varlen(*leaves, wa.Ragged(ends), **terms, return_lse=has_lse, backend=backend)

    return Large(f"{lengths} {heads}/{heads_kv} {dim} {terms}", run, leaves, (-1,))


def paged(chance: random.Random) -> Large:
    """`attention_paged` of many sequences, latents among them."""
    latent = chance.random() < 0.3
    heads, heads_kv = (chance.choice((16, 128)), 1) if latent else chance.choice(HEADS)
    dim, dim_v = (576, 512) if latent else [chance.choice(DIMS)] * 2
    lengths, page, tokens = chance.choices(PAGED_LENGTHS, k=40), chance.choice((16, 64)), chance.choice((1, 1, 2, 8))
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts), device="cuda").int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    keys = normal((sum(counts), page, heads_kv, dim), torch.bfloat16)
    values = keys[..., :dim_v] if latent else normal(keys.shape, torch.bfloat16)
    kv = wa.PagedKV(keys, values, table, torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    q = normal((len(lengths), tokens, heads, dim), torch.bfloat16)

    def run(backend: Any, has_lse: bool) -> Any:
        return wa.attention_paged(q, kv, mask=wa.Causal(), return_lse=has_lse, backend=backend)

    return Large(f"{lengths} pages of {page} {heads}/{heads_kv} {dim} x{tokens}", run, (), (1, 3))


def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random numbers on the card."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def terms_of(chance: random.Random, heads: int) -> dict[str, Any]:
    """A mask, a score function and sinks."""
    sinks = torch.randn(heads, device="cuda") if chance.random() < 0.2 else None
    return {"mask": mask(chance), "score": score(chance, heads), "sinks": sinks}


def mask(chance: random.Random) -> Any:
    """A mask of indices."""
    window = wa.SlidingWindow(chance.choice((64, 128, 500)), right=chance.choice((0, 0, 40)))
    chunks = wa.Chunked(chance.choice((300, 1024))) & wa.Causal()
    return chance.choice((None, wa.Causal(), wa.Causal(), window, window, wa.Prefix(200) | window, chunks))


def score(chance: random.Random, heads: int) -> Any:
    """A score function."""
    return chance.choice((None, None, None, wa.SoftCap(20.0), wa.ALiBi(torch.rand(heads, device="cuda"))))


def in_tiles(gradient: Tensor) -> Tensor:
    """A ragged gradient (tokens, heads, dim) in tiles of 64 tokens, (tiles, 64, heads, dim): what a program that never
    ran would leave out. A row alone says little: where one key has nearly all of the weight, dP - delta is a difference
    of two numbers that are rounded, and an emulation of these roundings in fp64 is off by 14 % of such a row."""
    missing = -len(gradient) % TILE
    return torch.nn.functional.pad(gradient, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, TILE))


def worst(found: Tensor, truth: Tensor, rows: tuple[int, ...], noise: float = 0.0) -> float:
    """The largest error of a head over its norm; `noise` an element is no error."""
    if not truth.numel():
        return 0.0
    error, size = ((x.float().square().sum(rows)).sqrt() for x in (found.float() - truth.float(), truth))
    elements = truth.numel() / size.numel()
    return (error / (size + (noise + 2e-3 * truth.abs().max()) * elements**0.5 + 1e-6)).max().item()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_head_of_a_large_call(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    call = (dense, dense, ragged, paged)[seed % 4](chance)
    backend = wa.Backend("auto", deterministic=True) if call.leaves and seed % 8 < 4 else "auto"
    out, lse = call.run(backend, True)
    truth, true_lse = call.run("reference", True)
    with torch.no_grad():
        alone = call.run(backend, False)  # references move later
    assert max(worst(x, truth, call.rows) for x in (out, alone)) <= ERROR, call.text
    assert torch.equal(lse.isneginf(), true_lse.isneginf()), call.text
    assert ((lse - true_lse).nan_to_num(0.0).abs() <= ERROR).all(), call.text
    if call.leaves:
        dout = torch.randn_like(truth)
        found = torch.autograd.grad(out, call.leaves, dout)
        wanted = torch.autograd.grad(truth, call.leaves, dout)
        for one, other in zip(found, wanted, strict=True):
            one, other = (x if x.dim() == 4 else in_tiles(x) for x in (one, other))
            assert worst(one, other, (1, 3), NOISE) <= ERROR_OF_GRADIENTS, call.text
