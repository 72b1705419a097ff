"""Decorates functions with another library's signature: each argument is served, a hint, or refused, never ignored.

The signature is a text, as its library documents it. The decorated function gets one value with an attribute per
argument, so twenty arguments do not need twenty parameters:

    @drop_in("q: 4, k, v, dropout_p=0.0, scale: number=None, causal=False, num_splits=1",
             refused={"dropout_p": "there is no dropout"}, hints={"num_splits"})
    def flash_attn_func(given):
        return attention(given.q, given.k, given.v, mask=Causal() if given.causal else None)

refused   any value but the default raises an AttentionError: argument, value, rule
hints     choose among ways to compute the same result; accepted and not used
names     from names in this package's errors to names in this signature

The text after a colon says what the argument must be, unless it is the default None: `4` a tensor of that rank,
`(3, 4)` of one of these (`None` among them: or None), `tensor` of any, `ints` one of integers of rank 1, `table` of
rank 2, `number`, `whole` an int, `count` an int from 0 on. True and False as a default make it a flag.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from warpattn.errors import AttentionError
from warpattn.inputs import is_tensor, kind_of, number
from warpattn.language.traced import MAX_INT

TORCHS_NAMES = {"q": "query", "k": "key", "v": "value"}
Kind = tuple[int | str | None, ...]
NUMBERS = {"number": "a number", "whole": "an int", "count": "an int from 0 on"}
INTEGERS = {"ints": 1, "table": 2}  # ranks


class Given:
    """The arguments of one call, by name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():  # no update of __dict__: torch.compile of 2.11 cannot trace it
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the function has no argument {name}")


def drop_in(
    signature: str,
    refused: Mapping[str, str] | None = None,
    hints: Collection[str] = (),
    names: Mapping[str, str] | None = None,
) -> Callable[[Callable[[Given], Any]], Callable[..., Any]]:
    """Make a decorator that gives a function of one `Given` the signature `signature`; see the module."""
    spec, kinds = _parsed(signature)
    positional = tuple(p.name for p in spec.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD)
    defaults = {p.name: p.default for p in spec.parameters.values() if p.default is not p.empty}
    required = spec.parameters.keys() - defaults.keys()
    rules = dict(refused or {})
    unknown = (rules.keys() - defaults.keys()) | (set(hints) - spec.parameters.keys())
    if unknown:
        raise ValueError(f"{sorted(unknown)} are no (optional) arguments of ({signature})")

    def decorate(serve: Callable[[Given], Any]) -> Callable[..., Any]:
        served = serve if names is None else with_names(names)(serve)

        @functools.wraps(serve)
        def function(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(positional, args, strict=False))
            fits = len(args) <= len(positional) and kwargs.keys() <= spec.parameters.keys()
            if not fits or given.keys() & kwargs.keys() or not required <= given.keys() | kwargs.keys():
                spec.bind(*args, **kwargs)  # raises the TypeError that Python would
            values = defaults | given | kwargs
            broken = [
                f"{name} is {kind_of(values[name])}; {rule}"
                for name, rule in rules.items()
                if not _same(values[name], defaults[name])
            ]
            broken += [
                f"{name} is {kind_of(values[name])}; it must be True or False"
                for name, default in defaults.items()
                if isinstance(default, bool) and not is_flag(values[name])
            ]
            for name, kind in () if broken else kinds.items():
                if values[name] is not None or not (name in defaults or None in kind):
                    broken += _faults(name, values[name], kind)
            if broken:
                raise AttentionError(*broken)
            return served(Given(values))

        function.__signature__ = spec  # type: ignore[attr-defined]
        function.refused = frozenset(rules)  # type: ignore[attr-defined]
        function.hints = frozenset(hints)  # type: ignore[attr-defined]
        return function

    return decorate


def with_names(names: Mapping[str, str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a decorator that renames arguments in errors of a function."""

    def decorate(serve: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(serve)
        def function(*args: Any, **kwargs: Any) -> Any:
            try:
                return serve(*args, **kwargs)
            except AttentionError as error:
                raise AttentionError(*(_renamed(reason, names) for reason in error.reasons)) from error

        return function

    return decorate


def _parsed(signature: str) -> tuple[inspect.Signature, dict[str, Kind]]:
    """Return the signature, and what the arguments with a colon must be."""
    (function,) = ast.parse(f"def function({signature}): ...").body
    assert isinstance(function, ast.FunctionDef)  # it was written as one
    spec = function.args
    defaults = [inspect.Parameter.empty] * (len(spec.args) - len(spec.defaults)) + list(map(_literal, spec.defaults))
    plain, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(a.arg, plain, default=d) for a, d in zip(spec.args, defaults, strict=True)]
    for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        parameters.append(inspect.Parameter(argument.arg, named, default=_literal(default)))
    kinds = {x.arg: _kind(x.annotation) for x in (*spec.args, *spec.kwonlyargs) if x.annotation is not None}
    return inspect.Signature(parameters), kinds


def _kind(node: ast.expr) -> Kind:
    if isinstance(node, ast.Name):
        return (node.id,)
    ranks = ast.literal_eval(node)
    return ranks if isinstance(ranks, tuple) else (ranks,)


def _faults(name: str, value: Any, kind: Kind) -> list[str]:
    """Return one sentence if a value is not of its kind, else none."""
    (first, *_) = kind
    if first in NUMBERS:
        fits = _is_number(number(value), str(first))
        return [] if fits else [f"{name} is {kind_of(value)}; it must be {NUMBERS[str(first)]}"]
    if not is_tensor(value):
        return [f"{name} is {kind_of(value)}; it must be a tensor"]
    ranks = tuple(INTEGERS.get(rank, rank) if isinstance(rank, str) else rank for rank in kind)
    if "tensor" not in kind and value.ndim not in ranks:
        listed = " or ".join(str(rank) for rank in ranks if rank is not None)
        return [f"{name} has shape {tuple(value.shape)}; it must have rank {listed}"]
    return _not_integers(name, value) if first in INTEGERS else []


def _is_number(found: float | None, kind: str) -> bool:
    if kind == "number":
        return found is not None
    return isinstance(found, int) and (0 if kind == "count" else -MAX_INT) <= found <= MAX_INT


def require_integers(name: str, x: Tensor) -> None:
    """Require a tensor of offsets, lengths or indices to hold integers, on the CPU ones that fit 32 bits."""
    if reasons := _not_integers(name, x):
        raise AttentionError(*reasons)


def _not_integers(name: str, x: Tensor) -> list[str]:
    if x.dtype not in (torch.int32, torch.int64):
        return [f"{name} has dtype {x.dtype}; it must be torch.int32 or torch.int64"]
    if x.dtype == torch.int32 or x.device.type != "cpu" or not x.numel() or torch.compiler.is_compiling():
        return []
    far = max(int(x.max()), int(x.min()), key=abs)
    return [] if -(2**31) <= far < 2**31 else [f"{name} has the element {far}; it must be of 32 bits"]


def _literal(node: ast.expr | None) -> Any:
    return inspect.Parameter.empty if node is None else ast.literal_eval(node)


def _renamed(reason: str, names: Mapping[str, str]) -> str:
    """Rename in whole words only: `k_new` is not part of `cu_seqlens_k_new`."""
    if re.match(r".+?:\d+: ", reason):  # of users' code
        return reason
    ours = "|".join(re.escape(name) for name in names)
    return re.sub(rf"(?<![\w.])(?:{ours})(?!(?<=\w)\w)", lambda found: names[found[0]], reason)


def _same(value: Any, default: Any) -> bool:
    """Whether an argument equals its default; None always means that it is left out."""
    if value is None or isinstance(value, Tensor):
        return value is None
    try:
        same = value == default
    except Exception:  # an object that cannot be compared is not the default
        return False
    return not getattr(same, "shape", ()) and bool(same)  # NumPy compares arrays element by element


def is_flag(value: Any) -> bool:
    """Whether `value` is true or false: also None, 0, 1, NumPy's and tensors of one element without dimensions."""
    if isinstance(value, Tensor):
        return is_tensor(value) and value.ndim == 0
    return value is None or isinstance(value, int) or getattr(value, "shape", None) == ()
