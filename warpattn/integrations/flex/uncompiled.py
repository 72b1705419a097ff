"""`flex_attention` in a compiled function: it runs between graphs, because tracers cannot follow the user's functions.

So `torch.compile(flex_attention)`, as FlexAttention's users write, works; torch refuses `fullgraph=True`.
A mask that was converted before (`flex.mask_of`) is part of the graph: `warpattn.attention(q, k, v, mask=mask)`.
"""

from __future__ import annotations

from typing import Any

import torch

from warpattn.integrations.flex import call

attend: Any = torch.compiler.disable(call.attend)
