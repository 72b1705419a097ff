"""`flash_attn.bert_padding`: from padded batches to packed rows and back, with torch alone."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices]; differentiable."""
    return input.index_select(0, indices.long())


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`values` at the rows `indices` of a tensor of `first_axis_dim` rows, zeros elsewhere; differentiable."""
    empty = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return empty.index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """hidden_states (batch, seq, ...) at the places that a mask (batch, seq) keeps.

    Returns rows (total, ...), their indices in the flattened batch, cu_seqlens int32 (batch + 1,), the longest length,
    and the lengths that attention_mask gives. Places of unused_mask are kept, too, and do not count in those.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Rows (total, ...) back in their places of a batch (batch, seqlen, ...), zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
