"""How compiled graphs call a function that writes a cache: as an operator of torch's, because a tracer cannot follow
the function and has to know which tensors it writes. And how a plan, which no graph can hold, ends a graph."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.torch_modes import is_recorded

WITHOUT = "call it under torch.no_grad()"
WRITTEN = ("k_pages", "v_pages", "k_scale", "v_scale")
_library = torch.library.Library("warpattn", "FRAGMENT")


def operator_of(function: Callable[..., None]) -> Any:
    """The operator `warpattn::NAME` with the name and the parameters of `function`, which runs, and checks its rules,
    when the graph does.

    `torch.library.custom_op` would do, but takes no tensors by keyword, and a tenth of a second of every import.
    """
    name, names = function.__name__, tuple(signature(function).parameters)

    def run(*given: Any, **named: Any) -> None:
        function(**dict(zip(names, given, strict=False)), **named)

    def refuse_gradients(*given: Any, **named: Any) -> None:
        """What the function itself would refuse; it runs below autograd, where no tensor requires any."""
        every = {**dict(zip(names, given, strict=False)), **named}
        asking = [key for key, x in every.items() if isinstance(x, Tensor) and x.requires_grad]
        if asking and torch.is_grad_enabled():
            raise AttentionError(*(f"{key} requires a gradient; {name} has none; {WITHOUT}" for key in asking))
        with torch._C._AutoDispatchBelowAutograd():
            operator(*given, **named)

    # Inductor passes all arguments by position, so none may be for keywords alone.
    _library.define(name + torch.library.infer_schema(function, mutates_args=WRITTEN).replace("*, ", ""))
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, lambda *given, **named: None, "Meta")
    _library.impl(name, refuse_gradients, "Autograd")
    operator = getattr(torch.ops.warpattn, name).default
    return operator


def break_graph() -> None:
    """End the graph that torch.compile traces; with fullgraph=True torch raises an error with this sentence, and we do
    where torch records otherwise."""
    if not is_recorded():
        return
    rule = "call it outside of the graph, or attention_paged or attention_varlen in it"
    why = f"a plan writes addresses, which a graph cannot hold; {rule}"
    if not torch.compiler.is_compiling():
        raise AttentionError(why)
    torch._dynamo.graph_break(msg=why)
