"""Tensors that a backward reads again and that have no gradient: those of masks, offsets and lengths.

autograd checks the tensors that it saves. These are not saved, so that hooks which move saved tensors leave them alone;
their versions are kept instead, and one that was changed in place is one error instead of wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.inputs import kind_of

Versions = list[tuple[str, Tensor, int]]


def versions(mask: Iterable[Tensor], indices: dict[str, Tensor]) -> Versions:
    """Return the versions of a mask's tensors and of a sequence's; inference tensors have none."""
    named = [*(("", tensor) for tensor in mask), *indices.items()]
    return [(name, tensor, tensor._version) for name, tensor in named if not tensor.is_inference()]


def check_unchanged(seen: Versions) -> None:
    """Raise AttentionError if a tensor has been changed in place since its version was taken."""
    for name, tensor, version in seen:
        if tensor._version != version:
            what = name or f"a tensor of the mask ({kind_of(tensor)})"
            rule = "the backward reads it again, so change a clone, or change it after the backward"
            raise AttentionError(f"{what} has been changed in place since the forward; {rule}")
