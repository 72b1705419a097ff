"""warpattn as an attention implementation of Hugging Face transformers (extra `transformers`).

    from warpattn.integrations.transformers import register
    register()
    model = AutoModel.from_pretrained(name, attn_implementation="warpattn")

transformers calls two functions of an implementation: one makes the mask, once per forward pass, the other attends,
once per layer. Its own implementations pass a (batch, 1, queries, keys) tensor between the two. Ours passes a `Mask`:
it knows which tiles it hides, and has a few bytes where the tensor grows with the square of the length.

    model ── build_mask ──► Mask ──┬── attend(layer 0) ── attention | attention_varlen
             (masks.py)            ├── attend(layer 1)    (attend.py)
                                   └── ...
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from warpattn.integrations.transformers.attend import attend
from warpattn.integrations.transformers.continuous import admit
from warpattn.integrations.transformers.masks import build_mask

__all__ = ["NAME", "attend", "build_mask", "register"]

NAME = "warpattn"


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` known to transformers, `generate_batch` included; calling it again changes
    nothing."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, build_mask)
    admit(name)
