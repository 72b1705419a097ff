"""`CallShape`, a call that `tune` measures: its sizes, mask and score; it makes tensors for the call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules
from warpattn.inputs import kind_of
from warpattn.language.traced import MAX_INT, whole
from warpattn.masks import Mask
from warpattn.problem import Call, CheckedCall, validate
from warpattn.problem.operands import Operands
from warpattn.scores import Score
from warpattn.sequences import Dense, PagedKV
from warpattn.serving.layers import LargestStep, Layer

STEP = LargestStep(requests=32, tokens=8192, length=8192)
SHARP = 4.0  # standard deviation of queries: logits of about 4, so that a few keys have most of the weight


class TunedCall(NamedTuple):
    """A call to be measured or compiled."""

    checked: CheckedCall
    operands: Operands
    sequence: Dense | PagedKV

    @property
    def bytes(self) -> int:
        """Bytes of q, k and v."""
        return sum(x.numel() * x.element_size() for x in (self.operands.q, self.operands.k, self.operands.v))


@dataclass(frozen=True)
class CallShape:
    """One call: `queries` tokens of each of `requests` sequences over `keys` keys, dense or in pages.

    page_size: keys of a page; 0: dense. mask, score: if None, those of the layer. A tuned choice is for exactly these
    sizes; over pages `keys` is the capacity of a row of the block table, columns x page_size.
    """

    layer: Layer
    requests: int
    queries: int
    keys: int
    page_size: int = 0
    mask: Mask | None = None
    score: Score | None = None

    def __post_init__(self) -> None:
        rules = Rules()
        fine = rules.require(isinstance(self.layer, Layer), f"layer is {kind_of(self.layer)}", "it must be a Layer")
        if fine and self.layer.cache is not None:
            rules.add(f"layer has {self.layer.cache}", "what is tuned has keys and values of 16 bits")
        for name, least in (("requests", 1), ("queries", 1), ("keys", 1), ("page_size", 0)):
            value = getattr(self, name)
            fine = isinstance(value, int) and whole(value, least) is not None
            rules.require(fine, f"{name} is {kind_of(value)}", f"it must be an integer from {least} to {MAX_INT}")
        for name, kind in (("mask", Mask), ("score", Score)):
            value = getattr(self, name)
            fine = value is None or isinstance(value, kind)
            rules.require(fine, f"{name} is {kind_of(value)}", f"it must be a {kind.__name__} or None")
        rules.done()
        if self.page_size and self.keys % self.page_size:
            raise AttentionError(f"keys is {self.keys}; over pages of {self.page_size} it must be a multiple of that")

    def __str__(self) -> str:
        layer, tail = self.layer, f", pages of {self.page_size}" if self.page_size else ""
        dims = f"{layer.dim_qk}/{layer.dim_v}"
        modifiers = f", {self.call_mask}" + (f", {self.call_score}" if self.call_score else "")
        size = f"{self.requests}x{self.queries}/{self.keys}x{layer.heads_q}/{layer.heads_kv}x{dims}"
        return f"{size} {str(layer.dtype).removeprefix('torch.')}{modifiers}{tail}"

    @property
    def call_mask(self) -> Mask:
        """The mask of the call."""
        return self.layer.mask if self.mask is None else self.mask

    @property
    def call_score(self) -> Score | None:
        """The score of the call."""
        return self.layer.score if self.score is None else self.score

    def planned(self) -> TunedCall:
        """Return the call on tensors expanded from one element, enough to plan and compile kernels."""
        one = torch.empty(1, dtype=self.layer.dtype, device="cpu")
        return self._of(lambda *size: one.expand(size), torch.Generator())

    def drawn(self, device: torch.device, seed: int) -> TunedCall:
        """Return the call on random tensors, the same for a seed; pages are in random order."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(self.layer.dtype)

        call = self._of(normal, generator)
        call.operands.q.mul_(SHARP)
        return call

    def _of(self, make: Any, generator: torch.Generator) -> TunedCall:
        layer, device = self.layer, generator.device
        q = make(self.requests, self.queries, layer.heads_q, layer.dim_qk)
        sequence: Dense | PagedKV = Dense()
        if self.page_size:
            columns = self.keys // self.page_size
            pages = self.requests * columns
            k, v = self._keys(make, pages, self.page_size)
            table = torch.randperm(pages, generator=generator, device=device).int().view(self.requests, columns)
            lengths = torch.full((self.requests,), self.keys, dtype=torch.int32, device=device)
            sequence = PagedKV(k, v, table, lengths)
        else:
            k, v = self._keys(make, self.requests, self.keys)
        sinks = torch.zeros(layer.heads_q, dtype=torch.float32, device=device) if layer.sinks else None
        call = Call(q, k, v, sequence, self.call_mask, self.call_score, sinks, backend="reference")
        checked = replace(validate(call, read_values=False), backend="sm90")
        out = torch.empty(*q.shape[:-1], layer.dim_v, dtype=q.dtype, device="meta" if q.stride(-1) == 0 else device)
        return TunedCall(checked, Operands(q, k, v, out, None, sinks), sequence)

    def _keys(self, make: Any, outer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Make keys and values; in latent attention values are a view of the keys."""
        layer = self.layer
        k = make(outer, rows, layer.heads_kv, layer.dim_qk)
        return k, k[..., : layer.latent] if layer.latent else make(outer, rows, layer.heads_kv, layer.dim_v)


def shapes_of(layers: Iterable[Layer], largest: LargestStep | None) -> list[CallShape]:
    """Return a prompt and a step of one token for each layer; layers of latent attention have only one of the two."""
    most, each = largest or STEP, list(dict.fromkeys(layers))
    keys = -(-most.length // most.page_size) * most.page_size
    tokens = min(most.tokens, most.length)
    latent = any(layer.latent for layer in each)  # then the steps of a model are over latents, its prompts are not
    prompts = [CallShape(layer, 1, tokens, tokens) for layer in each if not layer.latent]
    steps = [CallShape(x, most.requests, 1, keys, most.page_size) for x in each if bool(x.latent) == latent]
    return prompts + steps
