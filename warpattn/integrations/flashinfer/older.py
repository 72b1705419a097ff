"""Methods of FlashInfer's wrappers beside `plan` and `run`: the older `forward`, and the sizing of workspaces.

    wrapper.begin_forward(…)                                          `plan`
    wrapper.forward(q, cache, causal=True, sm_scale=0.1)              `run`, after these options replaced the plan's
    wrapper.end_forward()                                             nothing
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.inputs import kind_of
from warpattn.integrations.flashinfer.layer import Layer
from warpattn.integrations.signature import Given, drop_in

OPTIONS = ("causal", "pos_encoding_mode", "window_left", "logits_soft_cap", "sm_scale")
OF_RUN = ("q", "paged_kv_cache", "k", "v", "q_scale", "k_scale", "v_scale")
HINTS = ("rope_scale", "rope_theta", "use_fp16_qk_reduction")


class Wrapper:
    """Methods that all wrappers share."""

    is_cuda_graph_enabled = False
    layer: Layer | None = None

    def run_return_lse(self, *given: Any, **named: Any) -> Any:
        """`run` with return_lse."""
        return self.run(*given, **{"return_lse": True} | named)  # type: ignore[attr-defined]

    def end_forward(self) -> None:
        """Do nothing."""

    def reset_workspace_buffer(self, *buffers: Tensor, **named: Tensor) -> None:
        """Do nothing: kernels allocate their own workspaces."""

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Do nothing: one kernel takes any strides of keys and values. `warpattn warm` compiles ahead."""
        if not isinstance(variant, str) or variant != "independent":
            raise AttentionError(f"variant is {kind_of(variant)}; it must be independent")
        check_planned(self, "prewarm_paged_kv_stride_variant")


def check_planned(own: Any, call: str) -> None:
    """Check that `plan` was called."""
    if own.layer is None:
        raise AttentionError(f"{call} is called before plan; plan says what belongs to each request")


def layer_of(planned: Given, dim: int) -> Layer:
    """Return the layer of a plan; without an argument `causal`, as in decode, it is causal."""
    return Layer.of(planned, dim, vars(planned).get("causal", True))


def older_call(signature: str, return_lse: bool) -> Callable[..., Any]:
    """Make `forward`, or `forward_return_lse`. Options of a call replace the plan's, for later calls, too, as in
    FlashInfer; a custom mask stays."""

    @drop_in(signature, hints={name for name in HINTS if name in signature})
    def forward(given: Any) -> Any:
        own = given.self
        check_planned(own, "forward")
        changed = {name: getattr(given, name) for name in OPTIONS if name in vars(given)}
        if getattr(own, "own_mask", None) is not None:
            changed["causal"] = False
        planned = Given(vars(own.planned) | changed)
        own.layer, own.planned = layer_of(planned, given.q.shape[-1]), planned
        named = {name: value for name, value in vars(given).items() if name in OF_RUN}
        return own.run(**named, return_lse=return_lse)

    forward.__doc__ = f"`run`{' with return_lse' if return_lse else ''}, with options in place of the plan's."
    return forward
