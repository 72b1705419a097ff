"""`flash_attn.bert_padding`: converts padded batches to packed rows and back with torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.errors import Rules
from warpattn.inputs import is_tensor, kind_of, number, without_autocast
from warpattn.integrations.flash_attn.packed import within
from warpattn.language.traced import MAX_INT

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices]; differentiable."""
    return input.index_select(0, indices.long())


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`values` at the rows `indices` of a tensor of `first_axis_dim` rows, zeros elsewhere; differentiable."""
    empty = values.new_zeros((first_axis_dim, *values.shape[1:]))
    with without_autocast(values.device):
        return empty.index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the rows of hidden_states (batch, seq, ...) that a mask (batch, seq) keeps.

    Returns rows (total, ...), their indices in the flattened batch, cu_seqlens int32 (batch + 1,), the longest length,
    and the lengths by attention_mask. Rows of unused_mask are kept, too, but do not count in these lengths.
    """
    rules = Rules()
    for name, x in {"attention_mask": attention_mask, "unused_mask": unused_mask}.items():
        if x is not None or name == "attention_mask":
            rules.tensor(name, x, "batch", "seq")
    rules.done()
    fine = is_tensor(hidden_states) and hidden_states.shape[:2] == attention_mask.shape
    rules.require(fine, f"hidden_states is {kind_of(hidden_states)}", "it must be (batch, seq, ...) as the mask is")
    rules.done()
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Unpack rows (total, ...) into a batch (batch, seqlen, ...), zeros elsewhere."""
    rules = Rules()
    for name, size in (("batch", batch), ("seqlen", seqlen)):
        found = number(size)
        fine = isinstance(found, int) and 0 <= found <= MAX_INT
        rules.require(fine, f"{name} is {kind_of(size)}", "it must be an int from 0 on")
    fine = rules.tensor("indices", indices, "total") and is_tensor(hidden_states)
    fine = fine and hidden_states.ndim > 0 and len(hidden_states) == len(indices)
    rules.require(fine, f"hidden_states is {kind_of(hidden_states)}", "it must have a row for each of indices")
    rules.done()
    within("indices", indices, batch * seqlen, "places of the batch")
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
