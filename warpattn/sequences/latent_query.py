"""LatentQuery: absorbed queries of latent attention in two tensors, as a model's projections write them.

    nope (…, heads, L)  the part without positions, projected to the latents' columns      q_b_proj, then W_UK
    rope (…, heads, R)  the rotary part, often a view of a wider projection

Together they are the queries [nope | rope] of L + R columns. Kernels read both in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules
from warpattn.inputs import is_tensor, kind_of
from warpattn.quantized import EIGHT_BIT, Quantized
from warpattn.torch_modes import without_autocast

AXES = ("batch", "seq", "heads", "columns")


@dataclass(frozen=True, eq=False)
class LatentQuery:
    """Absorbed queries in two tensors, passed as q to `attention`, `attention_paged`, `DecodePlan` and others.

    nope (…, Hq, L), rope (…, Hq, R), with the leading axes of q, of one dtype and on one device, any strides; they mean
    `torch.cat([nope, rope], -1)`. Kernels take L = 512 and R = 64, and read `rope` in place: its last stride must be 1,
    others multiples of 8 elements, and it must start at a multiple of 16 bytes. The default scale is
    1/sqrt(L + R). Raises AttentionError if a part is no tensor; the call that gets it checks the rest.
    """

    nope: Tensor
    rope: Tensor

    def __post_init__(self) -> None:
        for name in ("nope", "rope"):
            x = getattr(self, name)
            if not is_tensor(x):
                raise AttentionError(f"{name} is {kind_of(x)}; {name} must be a torch.Tensor")
        if self.rope is self.nope:  # tensors of a call are separate objects
            object.__setattr__(self, "rope", self.rope.detach())

    def joined(self) -> Tensor:
        """Return the queries as one tensor (…, Hq, L + R), a copy."""
        with without_autocast(self.nope.device):
            return torch.cat([self.nope, self.rope], -1)


WITH_PARTS = (Quantized, LatentQuery)


def of_parts(first: Tensor, *rope: Tensor) -> Tensor | LatentQuery:
    """Make the argument q from one tensor or two."""
    return LatentQuery(first, *rope) if rope else first


def parted(q: Tensor | Quantized | LatentQuery) -> tuple[Tensor, dict[str, Any]]:
    """Split an argument for queries into its tensor and fields for the sequence (q_scale or q_rope)."""
    if isinstance(q, Quantized):
        return q.values, {"q_scale": q.scale}
    return (q.nope, {"q_rope": q.rope}) if isinstance(q, LatentQuery) else (q, {})


def check_once(name: str, sequence: object, brought: dict[str, Any]) -> None:
    """Raise AttentionError if the sequence, argument `name` of the call, already has a field in `brought`: one of the
    two would be ignored."""
    twice = [field for field in brought if getattr(sequence, field) is not None]
    if twice:
        rule = "a Quantized or a LatentQuery of the call has its own: leave it None"
        raise AttentionError(*[f"{name}.{field} is given; {rule}" for field in twice])


def check_rope(rules: Rules, q: Tensor, rope: Tensor) -> bool:
    """Check the rotary part of queries `q`; True if its rank is right."""
    if not rules.tensor("q.rope", rope, *AXES[4 - q.ndim :]):
        return False
    rule = f"it must have those of q but for the columns, {tuple(q.shape[:-1])}"
    rules.require(rope.shape[:-1] == q.shape[:-1], f"q.rope has shape {tuple(rope.shape)}", rule)
    rules.require(rope.shape[-1] > 0, f"q.rope has shape {tuple(rope.shape)}", "it must have at least one column")
    rules.require(rope.dtype == q.dtype, f"q.rope has dtype {rope.dtype}", f"it must have the dtype of q, {q.dtype}")
    rule = "queries in two tensors have 16 bits or more"
    rules.require(q.dtype not in EIGHT_BIT, f"q has dtype {q.dtype} and a rotary part of its own", rule)
    return True
