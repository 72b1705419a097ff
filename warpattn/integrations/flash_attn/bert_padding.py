"""`flash_attn.bert_padding`: converts padded batches to packed rows and back with torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from warpattn.errors import AttentionError, Rules
from warpattn.inputs import is_tensor, kind_of, number
from warpattn.integrations.flash_attn.packed import within
from warpattn.integrations.signature import Given, drop_in
from warpattn.language.traced import MAX_INT
from warpattn.torch_modes import without_autocast

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


@drop_in("input: tensor, indices: ints")
def index_first_axis(given: Given) -> Tensor:
    """input[indices]; differentiable."""
    within("indices", given.indices, len(given.input) if given.input.ndim else 0, "rows of input")
    return given.input.index_select(0, given.indices.long())


@drop_in("input: tensor, indices: ints")
def index_first_axis_residual(given: Given) -> tuple[Tensor, Tensor]:
    """input[indices], and input; differentiable."""
    return index_first_axis(given.input, given.indices), given.input.view_as(given.input)


@drop_in("values: tensor, indices: ints, first_axis_dim: count")
def index_put_first_axis(given: Given) -> Tensor:
    """`values` at the rows `indices` of a tensor of `first_axis_dim` rows, zeros elsewhere; differentiable."""
    values, indices = given.values, given.indices
    if values.shape[:1] != indices.shape:
        rule = f"it must have a row for each of {len(indices)} indices"
        raise AttentionError(f"values has shape {tuple(values.shape)}; {rule}")
    within("indices", indices, given.first_axis_dim, "rows that first_axis_dim says")
    empty = values.new_zeros((given.first_axis_dim, *values.shape[1:]))
    with without_autocast(values.device):
        return empty.index_put((indices.long(),), values)


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
    _check_rows(rules, hidden_states, attention_mask)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    return *_packed(hidden_states, kept, kept.sum(-1, dtype=torch.int32)), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack hidden_states (batch, seq, ...) whose rows each hold several sequences, one after the other; their lengths
    are the numbers in attention_mask_in_length (batch, seq) that are not 0.

    Returns rows (total, ...), their indices in the flattened batch, cu_seqlens int32 (sequences + 1,), the longest
    length.
    """
    rules, lengths = Rules(), attention_mask_in_length
    rules.tensor("attention_mask_in_length", lengths, "batch", "seq")
    _check_rows(rules, hidden_states, lengths)
    used, seq = lengths.sum(-1), lengths.shape[1]
    if used.device.type == "cpu":
        wrong = (used > seq) | (lengths < 0).any(-1)
        found = f"attention_mask_in_length has a row {kind_of(lengths[wrong][:1].flatten().tolist())}"
        rules.require(not wrong.any(), found, f"lengths must be 0 or more, their sum at most {seq}, as long as a row")
        rules.done()
    kept = torch.arange(seq, device=used.device) < used[:, None]
    return _packed(hidden_states, kept, lengths[lengths != 0])


def _check_rows(rules: Rules, hidden_states: Tensor, mask: Tensor) -> None:
    """Raise for broken rules, and for rows that are not those of a mask (batch, seq)."""
    rules.done()
    fine = is_tensor(hidden_states) and hidden_states.shape[:2] == mask.shape
    rules.require(fine, f"hidden_states is {kind_of(hidden_states)}", "it must be (batch, seq, ...) as the mask is")
    rules.done()


def _packed(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack the rows that a mask (batch, seq) keeps, of sequences with `lengths`."""
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


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
