"""`flex_attention` in a compiled function: it runs between graphs, because tracers cannot follow the user's functions.

`torch.compile(flex_attention)`, as programs for FlexAttention write, works so; `fullgraph=True` is refused by torch.
A mask that was converted before (`flex.mask_of`) is part of the graph: `warpattn.attention(q, k, v, mask=mask)`.
"""

from __future__ import annotations

from typing import Any

import torch

from warpattn.integrations.flex import call

attend: Any = torch.compiler.disable(call.attend)
