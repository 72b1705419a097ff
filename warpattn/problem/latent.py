"""Rules of absorbed latent attention (MLA): which calls the kernels take."""

from __future__ import annotations

from torch import Tensor

from warpattn.errors import Rules
from warpattn.problem.backends import LATENT, LATENT_TOKENS, USE_REFERENCE
from warpattn.problem.memory import begins_with, has_memory
from warpattn.problem.operands import addressable
from warpattn.problem.problem import Call, Problem
from warpattn.sequences import Sizes

WHERE = f"with head dims {LATENT.qk} and {LATENT.v} (latent attention)"


def check_latent(rules: Rules, kind: str, sizes: Sizes | Problem) -> None:
    """Require few query tokens, and keys that are not ragged."""
    rule = f"{WHERE} kernels take dense and paged ones; {USE_REFERENCE}"
    rules.require(kind != "ragged", f"the keys and values are {kind}", rule)
    rule = f"{WHERE} kernels take at most {LATENT_TOKENS}; {USE_REFERENCE}, or expand keys and values for prefill"
    tokens, bound = (sizes.max_q, "up to ") if sizes.max_q else (sizes.seq_q, "")
    few = kind == "ragged" or tokens <= LATENT_TOKENS
    rules.require(few, f"q has {bound}{tokens} tokens a sequence{' by seq.max_q' if bound else ''}", rule)


def check_latent_view(rules: Rules, call: Call) -> None:
    """Require values that are a view of the first columns of the keys."""
    _, (k_name, k), (v_name, v) = call.sequence.operands(call.q, call.k, call.v).items()
    what = f"{v_name} has strides {v.stride()} at {v.data_ptr()}, {k_name} {k.stride()} at {k.data_ptr()}"
    rule = f"{WHERE} a token's value is part of its key: {v_name} must be the view {k_name}[..., :{LATENT.v}]"
    rules.require(begins_with(k, v), what, rule)


def check_rope(rules: Rules, rope: Tensor, sizes: Sizes) -> None:
    """Check the rotary part of queries in two tensors, which kernels read in place."""
    columns, rotary = rope.shape[-1], LATENT.qk - LATENT.v
    what = f"q has {sizes.dim_qk - columns} columns and a rotary part of {columns}"
    rule = f"kernels take {LATENT.v} and {rotary}, for values of {LATENT.v}; {USE_REFERENCE} or join them"
    rules.require((sizes.dim_qk, sizes.dim_v, columns) == (*LATENT, rotary), what, rule)
    if not has_memory(rope):  # traced: checked again when the graph runs
        return
    what = f"q.rope has strides {rope.stride()} at {rope.data_ptr()}"
    rule = "its last stride must be 1, the others multiples of 8 elements, and it must start at a multiple of 16 bytes"
    rules.require(addressable(rope), what, rule)
