"""Runs functions written for FlexAttention with symbols, so that they become masks and scores.

FlexAttention's functions take 0-dimensional tensors and use torch on them. Here they get a `Symbol`, which looks like
such a tensor and records what is done to it in the language of `warpattn.language.expr`:

    score_mod(score, b, h, q_idx, kv_idx)      torch.where(kv_idx <= q_idx, score + bias[h, q_idx - kv_idx], ...)
                 │ run(fn, symbols)
                 ▼
    Expr: nodes of the language; tensors that the function reads become captured ones

Tensors are read under a `TorchFunctionMode`, because torch alone would ask a symbol for its number. A negative index
counts from the end, as in torch; an index beyond the end gives 0, where torch fails or reads other memory. What has
no translation is an AttentionError that names the operation and the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from warpattn.errors import AttentionError
from warpattn.integrations.flex.functions import (
    BINARY,
    COMPARISONS,
    TORCH_DTYPES,
    UNARY,
    NoMethod,
    NoTranslation,
    function,
)
from warpattn.integrations.flex.narrow import BITS, narrow_dtype, narrowed
from warpattn.language import expr
from warpattn.language.expr import Expr, Node
from warpattn.language.nodes import const
from warpattn.language.ranges import whole_number
from warpattn.language.user_code import line_of, named, raised_at

_RULE = (
    "what is translated: arithmetic, comparisons, & | ~, torch functions of single numbers (where, minimum, clamp, "
    "abs, exp, tanh, ...) and reads of tensors at one index per dimension"
)
POSITIONAL = ("condition", "input", "self", "end", "other", "exponent", "weight")  # torch's names, in torch's order
ABOUT = ("dim", "numel", "size", "is_floating_point")  # questions about a symbol whose answers are no symbols
MOST_ELEMENTS = 64  # of a tensor for isin, which becomes one comparison for each
_WITHOUT_MEANING = ("device", "layout", "memory_format", "non_blocking", "copy", "requires_grad", "pin_memory",
                    "inplace")  # fmt: skip
_ROW = (("sym", "int", "q"), ("sub", "int", ("sym", "int", "len_k"), ("sym", "int", "len_q")))


def run(fn: Callable[..., Any], *args: Any, kept: bool = False) -> Any:
    """Call `fn(*args)` with every Expr as a Symbol; returns an Expr or a Python number. Only inside of a trace.

    kept: later calls use the result, too, so what it makes of a tensor that requires a gradient is translated as well.
    Raises AttentionError with the function's line for operations that cannot be recorded.
    """
    recording = _Recording(kept)
    token = _recording.set(recording)
    try:
        with _differentiable() if kept else nullcontext(), recording:
            result = fn(*args_as_symbols(args))
        return recording.plain(result)
    except AttentionError:
        raise
    except (NoTranslation, TypeError, IndexError, AttributeError, RuntimeError, ValueError) as error:
        what = f"{error}" if isinstance(error, NoTranslation) else named(error)
        raise AttentionError(f"{raised_at(error) or line_of(fn)}: {what}; {_RULE}") from error
    finally:
        _recording.reset(token)


@contextmanager
def _differentiable() -> Iterator[None]:
    """Tensors show whether they depend on one that requires a gradient, whatever the mode of the call."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def args_as_symbols(args: Iterable[Any]) -> tuple[Any, ...]:
    """Return the arguments of a user's function: an Expr as a Symbol, others unchanged."""
    return tuple(Symbol(x) if isinstance(x, Expr) else x for x in args)


class _Recording(TorchFunctionMode):
    """Translates torch functions that get a Symbol, and remembers 0-dimensional tensors that others make.

    `torch.tensor(-1e9)` inside of a function is a constant; a 0-dimensional tensor from outside is read by kernels.
    """

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept = kept
        self.made: dict[int, Tensor] = {}  # by id, which is theirs as long as they are held here

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _has_symbol((*args, *kwargs.values())):
            return _call(_name(func), *args, **kwargs)
        result = func(*args, **kwargs)
        if self.kept and _is_differentiable(result, args):
            return self.learned(func, args, kwargs)
        inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if isinstance(result, Tensor) and result.ndim == 0 and all(id(x) in self.made for x in inputs):
            self.made[id(result)] = result
        return result

    def learned(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Translate what a kept function makes of a tensor that requires a gradient: a later call differentiates it."""
        name = _name(func)
        if name in ("__iter__", "unbind") and args[1:] in ((), (0,)) and not kwargs:
            rows = Rows(self, args[0], ())
            return iter(rows) if name == "__iter__" else tuple(rows)
        try:
            return self.translate(name, args, kwargs)
        except NoTranslation as error:
            name = name.strip("_") if name != "__get__" else func.__self__.__name__
            what = f"torch's {name} of a tensor that requires a gradient would run once and lose later gradients"
            rule = "give the function itself to flex_attention, which runs it in every call, or detach() the tensor"
            raise NoTranslation(f"{what}; {rule}") from error

    def translate(self, name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        """Translate a call of a torch function, method or operator to a Symbol (or Rows)."""
        if name == "__getitem__":
            owner, index = args
            if not isinstance(owner, Tensor):
                raise NoTranslation("an index of a number has no translation")
            return self.read(owner, index if isinstance(index, tuple) else (index,))
        meaning = function(name)
        if meaning is None:
            raise NoTranslation(f"torch's {name.strip('_')} has no translation")
        args = (*args, *(kwargs[key] for key in POSITIONAL if key in kwargs))
        kwargs = {key: value for key, value in kwargs.items() if key not in POSITIONAL}
        if name == "isin":
            args = (args[0], self.elements(args[1]), *args[2:])
        values = [self.plain(x) for x in args]
        named = {key: self.plain(x) for key, x in kwargs.items() if key not in _WITHOUT_MEANING}
        for x in (*values, *named.values()):
            if isinstance(x, Rows | Tensor):
                raise NoTranslation(f"torch's {name.strip('_')} of {_tensor(x)} has no translation")
        dtype = narrow_dtype(name.strip("_"), args, kwargs)
        return _symbol(narrowed(meaning(*values, **named), name.strip("_"), dtype), dtype)

    def read(self, tensor: Tensor, index: tuple[Any, ...]) -> Any:
        """`tensor[index]`; Rows if there are fewer indices than dimensions."""
        exact = [self.plain(i) for i in index]
        for i in exact:
            if isinstance(i, bool) or not (isinstance(i, int) or (isinstance(i, Expr) and i.dtype in ("int", "int64"))):
                kind = f"a {i.dtype}" if isinstance(i, Expr) else _tensor(i) if isinstance(i, Tensor) else repr(i)
                raise NoTranslation(f"{_tensor(tensor)} read at {kind} instead of an int has no translation")
        if len(exact) > tensor.ndim:
            raise NoTranslation(f"{_tensor(tensor)} read with {len(exact)} indices has no translation")
        if len(exact) < tensor.ndim:
            return Rows(self, tensor, tuple(exact))
        return _symbol(expr.load(tensor, *map(_from_start, exact, tensor.shape)), tensor.dtype)

    def elements(self, tensor: Any) -> Any:
        """Read all elements of a captured tensor, if there are few."""
        if not isinstance(tensor, Rows | Tensor) or (isinstance(tensor, Tensor) and not tensor.ndim):
            return (self.plain(tensor),)
        rows = tensor if isinstance(tensor, Rows) else Rows(self, tensor, ())
        if rows.tensor.shape[len(rows.index) :].numel() > MOST_ELEMENTS:
            raise NoTranslation(f"torch's isin of {_tensor(tensor)}, which has over {MOST_ELEMENTS} elements there, "
                                "has no translation")  # fmt: skip
        return tuple(x for row in rows for x in self.elements(row))

    def plain(self, value: Any) -> Any:
        """Return a Symbol as its Expr, a 0-dimensional tensor as a number or a read of it, other values unchanged."""
        if isinstance(value, Symbol):
            return value.expr
        if isinstance(value, Tensor) and value.ndim == 0:
            return value.item() if id(value) in self.made else expr.load(value)
        return value


_recording: ContextVar[_Recording | None] = ContextVar("warpattn_flex_recording", default=None)


class Symbol:
    """A 0-dimensional tensor whose value is not known yet. The operators are defined below the class."""

    __slots__ = ("expr", "narrow")
    __array_ufunc__ = None  # NumPy scalars leave `scalar * symbol` to Symbol
    __hash__ = None  # type: ignore[assignment]
    shape = torch.Size(())
    ndim = 0
    device = torch.device("cpu")  # of the constants that a function makes beside it

    def __init__(self, value: Expr, narrow: torch.dtype | None = None) -> None:
        self.expr = value
        self.narrow = narrow if narrow in BITS and value.dtype in ("int", "int64") else None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(_name(func), *args, **(kwargs or {}))

    @property
    def dtype(self) -> torch.dtype:
        """torch.bool, torch.int32, torch.int64, torch.float32, or the dtype of narrow integers that a tensor holds."""
        return self.narrow or TORCH_DTYPES[self.expr.dtype]

    def __getattr__(self, name: str) -> Any:
        name = "tensor_where" if name == "where" else name
        if name.startswith("_") or function(name) is None:
            raise NoMethod(f"{name} of a number has no translation")
        return lambda *args, **kwargs: _call(name, self, *args, **kwargs)

    def dim(self) -> int:
        return 0

    def numel(self) -> int:
        return 1

    def size(self) -> torch.Size:
        return self.shape

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, index: Any) -> Any:
        return _call("__getitem__", self, index)

    def __bool__(self) -> bool:
        return bool(self.expr)

    def __float__(self) -> float:
        return float(self.expr)

    def __index__(self) -> int:
        return int(self.expr)

    __int__ = __index__

    def __repr__(self) -> str:
        return f"Symbol({self.expr!r})"


def _operator(name: str) -> Callable[..., Any]:
    return lambda *operands: _call(name, *operands)


for _each in (*BINARY, *(f"r{_each}" for _each in BINARY), *COMPARISONS, *UNARY, "pos"):
    setattr(Symbol, f"__{_each}__", _operator(f"__{_each}__"))


class Rows:
    """A captured tensor with its first indices given, the others to come: `table[b][q_idx]`."""

    def __init__(self, recording: _Recording, tensor: Tensor, index: tuple[Any, ...]) -> None:
        self.recording, self.tensor, self.index = recording, tensor, index

    def __getitem__(self, index: Any) -> Any:
        return self.recording.read(self.tensor, (*self.index, *(index if isinstance(index, tuple) else (index,))))

    def __len__(self) -> int:
        return self.tensor.shape[len(self.index)]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func.__name__, *args, **(kwargs or {}))


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    recording = _recording.get()
    if name in ABOUT:
        return getattr(args[0], name)()
    if recording is None:
        raise NoTranslation("a symbol has left the function it was made for")
    return recording.translate(name, args, kwargs)


def _name(func: Any) -> str:
    return "tensor_where" if func is Tensor.where else func.__name__


def _symbol(value: Any, dtype: torch.dtype | None) -> Any:
    """Return an Expr or a number as a Symbol."""
    if isinstance(value, bool | float):
        value = Expr(const(value, type(value).__name__))
    elif isinstance(value, int):
        value = Expr(whole_number(value))
    return Symbol(value, dtype)


def _is_differentiable(result: Any, args: Any) -> bool:
    """Whether a result, or what it holds, is a new tensor that depends on one that requires a gradient."""
    if isinstance(result, tuple | list):
        return any(_is_differentiable(x, args) for x in result)
    if isinstance(result, Tensor):
        return result.requires_grad and not any(result is x for x in args)
    return isinstance(result, Iterator) and any(isinstance(x, Tensor) and x.requires_grad for x in args)


def _has_symbol(values: Iterable[Any]) -> bool:
    return any(isinstance(x, Symbol | Rows) or (isinstance(x, tuple | list) and _has_symbol(x)) for x in values)


def _tensor(x: Tensor | Rows) -> str:
    if isinstance(x, Rows):
        return f"a tensor of shape {tuple(x.tensor.shape)} read with {len(x.index)} indices"
    return f"a tensor of shape {tuple(x.shape)}"


def _from_start(i: Any, size: int) -> Any:
    """Convert an index from the end, -size .. -1, to one from the start."""
    if isinstance(i, int):
        return i + size if i < 0 else i
    return i if _at_least_0(i.node) else expr.where(i < 0, i + size, i)


def _at_least_0(node: Node) -> bool:
    """Whether a node is known not to be negative, so that a read needs no test for that."""
    op, operands = node.op, node.operands
    if op == "const":
        return node.value >= 0
    if op == "sym":
        return node.value in ("b", "h", "k", "len_q", "len_k")
    if op == "sub":
        return operands == _ROW
    if op in ("add", "mul", "minimum"):
        return all(_at_least_0(x) for x in operands)
    if op == "maximum":
        return any(_at_least_0(x) for x in operands)
    if op in ("floordiv", "mod"):
        dividend, divisor = operands
        return (op == "mod" or _at_least_0(dividend)) and divisor.is_constant and divisor.value > 0
    return op == "abs" or (op == "where" and all(_at_least_0(x) for x in operands[1:]))
