"""torch's `multi_head_attention_forward` with another attention: the same code, with this module's names.

torch runs what a mode has caught without the mode, so within `torch_sdpa.swapped()` the attention of an
nn.MultiheadAttention would stay torch's. The copy has a module of its own because torch's tracer looks names up there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

from torch import Tensor
from torch.nn import functional

TORCHS = functional.multi_head_attention_forward

globals().update({name: value for name, value in vars(functional).items() if not name.startswith("__")})


def calling(attention: Callable[..., Tensor]) -> FunctionType:
    """Return a copy of torch's function that calls `attention` in the place of scaled_dot_product_attention."""
    copy = FunctionType(TORCHS.__code__, globals(), TORCHS.__name__, TORCHS.__defaults__)
    globals().update(scaled_dot_product_attention=attention, multi_head_attention_forward=copy)  # other modes get it
    return copy
