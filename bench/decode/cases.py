"""Decode steps to time: lengths, heads, pages, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warpattn.problem.backends import LATENT


@dataclass(frozen=True)
class Case:
    """One decode step: the lengths of its sequences, heads, and the page size (0: dense)."""

    name: str
    lengths: tuple[int, ...]
    heads_q: int
    heads_kv: int
    page: int = 0
    tokens: int = 1
    dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = ""  # of keys and values, if they have 8 bits
    dim_v: int = 0  # in latent attention (MLA, absorbed): the values are these first columns of the keys

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def even(self) -> bool:
        """Whether all sequences are equally long."""
        return len(set(self.lengths)) == 1

    def bytes(self) -> int:
        """Bytes of the keys and values that are read, latents once."""
        return (1 if self.kv_dtype else 2) * (1 if self.dim_v else 2) * sum(self.lengths) * self.heads_kv * self.dim


@dataclass(frozen=True)
class Inputs:
    """q (B, T, Hq, D); k, v (B, S, Hkv, D), or pages (N, page, Hkv, D) with their table; lengths (B,)."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    lengths: Tensor
    scale: Tensor | None = None  # of 8-bit keys and values

    def sequence(self, b: int) -> tuple[Tensor, Tensor]:
        """Keys and values (S, Hkv, D) of one sequence."""
        length = self.case.lengths[b]
        if self.table is None:
            return self.k[b, :length], self.v[b, :length]
        used = self.table[b, : -(-length // self.case.page)].long()
        return self.k[used].flatten(0, 1)[:length], self.v[used].flatten(0, 1)[:length]


def cases() -> tuple[Case, ...]:
    """The rows that are required on a card: dense, then through pages of 16 and 64, then mixed lengths; and latent
    attention with 16 query heads (a model over 8 cards) and 128; last `shared_keys`."""
    shapes = [
        (32, 16, 32, 8), (128, 4, 32, 8), (64, 8, 64, 8), (16, 8, 32, 32), (32, 4, 32, 8), (8, 8, 32, 8),
        (1, 128, 32, 8), (1, 16, 32, 8),
    ]  # fmt: skip
    found = []
    for page in (0, 16, 64):
        kind = f"page{page}" if page else "dense"
        for batch, seq, heads, kv in shapes:
            found.append(Case(f"{kind}-{batch}x{seq}k-{heads}/{kv}", (seq * 1024,) * batch, heads, kv, page))
    ranks = [1 + (37 * i) % 64 for i in range(64)]  # in an order that is no order
    for name, power in (("mixed64", 1.0), ("skewed64", 2.5)):  # Zipf's law from 32 Ki down to 512 and to 1
        lengths = tuple(int(32768 / rank**power) for rank in ranks)
        found += [Case(f"page{page}-{name}", lengths, 32, 8, page) for page in (16, 64, 256)]
    for batch, seq, heads in ((128, 4, 16), (32, 16, 16), (1, 64, 16), (128, 4, 128), (32, 16, 128), (1, 64, 128)):
        name = f"mla-{batch}x{seq}k-{heads}"
        found.append(Case(name, (seq * 1024,) * batch, heads, 1, 64, dim=LATENT.qk, dim_v=LATENT.v))
    return (*found, *shared_keys())


def shared_keys() -> tuple[Case, ...]:
    """Row tiles that read the same keys, for batches that no number of CTAs divides and for unequal lengths."""
    unequal = tuple(1 + 1031 * i % 4096 for i in range(128))
    batches = {"129x2k": (2048,) * 129, "100x2k": (2048,) * 100, "unequal128": unequal}
    latent = [Case(f"mla-{name}-128", of, 128, 1, 64, dim=LATENT.qk, dim_v=LATENT.v) for name, of in batches.items()]
    return (*latent, Case("page64-100x8k-128/1", (8192,) * 100, 128, 1, 64))


def smoke_cases() -> tuple[Case, ...]:
    """Small ones for a CPU."""
    return (
        Case("smoke-dense", (512, 512), 8, 2, dim=64),
        Case("smoke-page16", (300, 77, 1), 8, 2, 16, dim=64),
        Case("smoke-mla", (130, 7), 16, 1, 64, dim=LATENT.qk, dim_v=LATENT.v),
    )


def make(case: Case, device: torch.device, seed: int) -> Inputs:
    """Random inputs; pages lie in random order."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    q = draw(case.batch, case.tokens, case.heads_q, case.dim)
    if not case.page:
        shape = (case.batch, max(case.lengths), case.heads_kv, case.dim)
        return Inputs(case, q, *keys_and_values(case, draw, *shape), None, lengths)
    counts = [-(-length // case.page) for length in case.lengths]
    order = torch.randperm(sum(counts), generator=generator, device=device).to(torch.int32)
    table = torch.zeros(case.batch, max(counts), dtype=torch.int32, device=device)
    for b, pages in enumerate(order.split(counts)):
        table[b, : len(pages)] = pages
    shape = (sum(counts), case.page, case.heads_kv, case.dim)
    return Inputs(case, q, *keys_and_values(case, draw, *shape), table, lengths)


def make_layers(case: Case, device: torch.device, seed: int, count: int) -> list[Inputs]:
    """Inputs of the layers of a model: queries, keys and values of their own, one table and one tensor of lengths."""
    layers = [make(case, device, seed + i) for i in range(count)]
    return [replace(x, table=layers[0].table, lengths=layers[0].lengths) for x in layers]


def keys_and_values(case: Case, draw: Callable[..., Tensor], *shape: int) -> tuple[Tensor, Tensor]:
    """Keys of a shape and values of their own, or their first columns."""
    k = draw(*shape)
    return k, k[..., : case.dim_v] if case.dim_v else draw(*shape)
