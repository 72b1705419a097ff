"""Numbers that torch.compile keeps open, in a user's function: a graph is made for their values of this trace.

torch's tracer makes no function of one whose closure, defaults or partial arguments hold an open number. `settled` puts
the numbers of this trace there, with a guard, as masks and scores do with numbers that are captured by name. Functions
that hold what has no value before the graph runs, such as its tensors, become one that refuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from warpattn.errors import AttentionError
from warpattn.inputs import with_article


def settled(fn: Any, owner: str) -> Any:
    """Return a function whose open numbers are those of this trace; outside of torch.compile `fn` itself."""
    if torch.compiler.is_compiling():
        from torch._dynamo.comptime import comptime  # imports torch's tracer, which is there

        comptime(_settle)
    return fn


def _settle(context: Any) -> None:
    """Settle or replace the local variable `fn` of the traced `settled`: called by the tracer."""
    with contextlib.suppress(AttributeError, ImportError, LookupError, TypeError):
        _settle_local(context)  # another torch's tracer has other values, and an error of its own for them


def _settle_local(context: Any) -> None:
    from torch._dynamo.variables import UserFunctionVariable

    tracer = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    local = [context.get_local(name) for name in ("fn", "owner")]
    fn, owner = (variable._i_will_not_complain_if_bc_breaks_VariableTracker() for variable in local)
    unknown = _settle_held(tracer, fn, "", set())
    if unknown is not None:
        what = f"reads {unknown}" if unknown else f"is {with_article(fn.python_type().__name__)}"
        tracer.symbolic_locals["fn"] = UserFunctionVariable(_refusal(owner.as_python_constant(), what, unknown))


def _refusal(owner: str, what: str, name: str) -> Callable[..., Any]:
    """Make a function in the place of one that holds what has no value before the graph runs."""
    name = name or "name"

    def refuse(*_: Any, **__: Any) -> Any:
        found = f"the function of {with_article(owner)} {what}, which torch.compile cannot open while it traces"
        raise AttentionError(f"{found}; pass tensors and numbers by name, as in {owner}(fn, {name}={name})")

    return refuse


def _settle_held(tracer: Any, value: Any, name: str, seen: set[int]) -> str | None:
    """Settle what a function, list, tuple or dictionary holds. Returns the name of what has no value; None if all has
    one. `name`: of `value` itself."""
    if id(value) in seen or _is_constant(value):
        return None
    seen.add(id(value))
    for place, held, put in _held(tracer, value, name):
        found = _settled(held, tracer)
        if found is not None:
            put(found)
        elif (unknown := _settle_held(tracer, held, place, seen)) is not None:
            return unknown
    return None if _is_constant(value) else name


def _held(tracer: Any, value: Any, name: str) -> list[tuple[str, Any, Callable[[Any], None]]]:
    """List (name, value, function that puts another there) of what a value of the tracer's holds."""
    effects, code = tracer.output.side_effects, getattr(value, "code", None)
    listed: list[tuple[str, Any, Callable[[Any], None]]] = []
    if code is not None and getattr(value, "closure", None):
        for free, cell in zip(code.as_python_constant().co_freevars, value.closure.items, strict=True):
            listed.append((free, effects.load_cell(cell), lambda x, cell=cell: effects.store_cell(cell, x)))
    for part in ("defaults", "kwdefaults", "args", "keywords", "items"):
        held, places = _container(getattr(value, part, None))
        for at in places:
            named = at if isinstance(at, str) else name
            listed.append((named, held[at], lambda x, held=held, at=at: held.__setitem__(at, x)))
    function = getattr(value, "func", None)  # of functools.partial
    return listed if function is None else [*listed, (name, function, lambda x: setattr(value, "func", x))]


def _container(held: Any) -> tuple[Any, list[Any]]:
    """Return the list or dictionary in which the tracer keeps the values of a container, and their places in it."""
    held = held if isinstance(held, dict) else getattr(held, "items", held)
    return held, list(held) if isinstance(held, dict) else list(range(len(held))) if isinstance(held, list) else []


def _settled(value: Any, tracer: Any) -> Any:
    """Return the constant for an open number; None for other values."""
    from torch._dynamo.variables import ConstantVariable, SymNodeVariable

    value = value.realize() if hasattr(value, "realize") else value
    return ConstantVariable.create(value.evaluate_expr(tracer.output)) if isinstance(value, SymNodeVariable) else None


def _is_constant(value: Any) -> bool:
    try:
        value.as_python_constant()
    except Exception:  # each torch has errors of its own here
        return False
    return True
