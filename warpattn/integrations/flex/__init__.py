"""FlexAttention's interface: `flex_attention` with its own argument order, and its functions as masks and scores.

    from warpattn.integrations.flex import flex_attention
    out = flex_attention(q, k, v, score_mod=alibi, block_mask=create_block_mask(causal, None, None, S, S))

`score_mod` and `mask_mod` are run once with symbols and translated (see `symbols`), a `BlockMask` also gives its
blocks (see `blocks`). FlexAttention's q_idx is the row of the query, counted from 0; the masks of this package
count a query in key positions, so that the last one sits at the last key.

Every call translates anew, since a function may read variables that change. `mask_of` and `score_of` translate once:

    window = mask_of(create_block_mask(sliding_window, None, None, S, S))
    out = warpattn.attention(q, k, v, mask=window)                              # (batch, seq, heads, head_dim)
"""

from __future__ import annotations

from typing import Any

import torch

from warpattn.integrations.flex.call import attend
from warpattn.integrations.flex.modifiers import MaskMod, ScoreMod, mask_of, score_of
from warpattn.integrations.signature import TORCHS_NAMES, Given, drop_in

__all__ = ["MaskMod", "ScoreMod", "flex_attention", "mask_of", "score_of"]


@drop_in(
    "query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, "
    "kernel_options=None, *, return_aux=None",
    hints={"kernel_options"},
    names=TORCHS_NAMES,
)
def flex_attention(given: Given) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, with its arguments.

    query (B, Hq, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv), the batch of key and value may be 1. `block_mask`
    may also be a mask_mod or a warpattn Mask, `score_mod` a warpattn Score. `kernel_options` tune FlexAttention's own
    kernels and are not used. Returns out (B, Hq, Sq, Dv), whose dimensions have the query's order in memory; with
    return_lse also lse (B, Hq, Sq), natural log; with return_aux also an AuxOutput. A row that sees no key gives 0 and
    an LSE of -inf. An autocast region casts the three tensors. Raises AttentionError.
    """
    if torch.compiler.is_compiling():
        from warpattn.integrations.flex import uncompiled  # imports torch._dynamo

        return uncompiled.attend(given)
    return attend(given)
