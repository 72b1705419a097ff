"""The language of masks and scores: functions of indices that are traced once, by calling them with symbols.

A mask is a function of the indices (b, h, q, k), a score is one of (s, b, h, q, k). A call with symbols records the
operations as nodes (see `nodes`); `evaluate` runs the nodes with torch (the reference) and the kernels compile
them. Functions are traced, never parsed, so a lambda or a function without source works.

Meaning, the same everywhere: `//` and `%` floor as in Python; `/` gives a float; int with float gives float; bool
counts as int in arithmetic; `to_int` cuts towards zero, to 32 bits at most (nan gives 0); a captured tensor read
outside its bounds gives 0 (False). An int `n // 0` is 0 and `n % 0` is n; floats follow IEEE: `/` and `//` by zero give
an infinity or nan, `%` nan. Ints have 32 bits, and 64 where an operand is an int64 tensor or where the result of 32-bit
operands might not fit; beyond 64 they wrap around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from warpattn.errors import AttentionError
from warpattn.inputs import of_type, tensor_fault
from warpattn.language import eager
from warpattn.language.nodes import Node, Program, Trace, build, cast, const, make, running
from warpattn.language.ranges import INT32, is_below, never_zero, whole_number, wide_enough
from warpattn.language.user_code import line_of, user_error

_RANK = {"bool": 0, "int": 1, "int64": 2, "float": 3}
_INTS = ("int", "int64")


def _both_ways(build: Callable[[Any, Any], Expr]) -> tuple[Callable[[Any, Any], Expr], Callable[[Any, Any], Expr]]:
    """Return the methods of an operator with the symbol on its left and on its right."""
    return (lambda symbol, other: build(symbol, other)), (lambda symbol, other: build(other, symbol))


class Expr:
    """A symbolic value: operators on it build nodes. `a == b` builds a comparison; compare identity by `.node`."""

    __slots__ = ("node",)
    __array_ufunc__ = None  # NumPy scalars leave `scalar * expr` to Expr
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def dtype(self) -> str:
        """Kind of the value: "bool", "int" (32 bits), "int64" or "float"."""
        return self.node.dtype

    def __repr__(self) -> str:
        return f"Expr({self.node!r})"

    __add__, __radd__ = _both_ways(lambda a, b: _arithmetic("add", a, b))
    __sub__, __rsub__ = _both_ways(lambda a, b: _arithmetic("sub", a, b))
    __mul__, __rmul__ = _both_ways(lambda a, b: _arithmetic("mul", a, b))
    __truediv__, __rtruediv__ = _both_ways(lambda a, b: _float_op("truediv", a, b))
    __floordiv__, __rfloordiv__ = _both_ways(lambda a, b: _division("floordiv", a, b))
    __mod__, __rmod__ = _both_ways(lambda a, b: _division("mod", a, b))
    __and__, __rand__ = _both_ways(lambda a, b: _bitwise("and", a, b))
    __or__, __ror__ = _both_ways(lambda a, b: _bitwise("or", a, b))
    __xor__, __rxor__ = _both_ways(lambda a, b: _bitwise("xor", a, b))
    __lshift__, __rlshift__ = _both_ways(lambda a, b: _shift("shl", a, b))
    __rshift__, __rrshift__ = _both_ways(lambda a, b: _shift("shr", a, b))

    def __pow__(self, exponent: Any) -> Any:
        return _power(self, exponent)

    def __rpow__(self, base: Any) -> Any:
        return exp(log(to_float(base)) * self)

    def __neg__(self) -> Expr:
        return _arithmetic("neg", self)

    def __abs__(self) -> Expr:
        return _arithmetic("abs", self)

    def __invert__(self) -> Expr:
        return _bitwise("not", self)

    def __lt__(self, other: Any) -> Expr:
        return _compare("lt", self, other)

    def __le__(self, other: Any) -> Expr:
        return _compare("le", self, other)

    def __gt__(self, other: Any) -> Expr:
        return _compare("gt", self, other)

    def __ge__(self, other: Any) -> Expr:
        return _compare("ge", self, other)

    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return _compare("eq", self, other)

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return _compare("ne", self, other)

    def __bool__(self) -> bool:
        raise user_error("a symbol has no truth value (if, and, or, not, in, a chained comparison)",
                          "use & | ~ and where()")  # fmt: skip

    def __float__(self) -> float:
        raise user_error("a symbol is not a number yet (float() or a function of math)",
                          "use to_float, exp, log, tanh, abs, minimum, maximum of warpattn")  # fmt: skip

    def __index__(self) -> int:
        raise user_error("a symbol is not a number yet (int(), range() or the index of a tensor or list)",
                          "use to_int; index tensors that are captured keyword arguments")  # fmt: skip

    __int__ = __index__

    def __len__(self) -> int:
        raise user_error("a symbol has no length", "it stands for one number")

    def __iter__(self) -> Iterator[Any]:
        raise user_error("a symbol cannot be iterated over", "it stands for one number")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        raise user_error(f"the torch function {name} got a symbol",
                          "use operators and where, minimum, maximum, exp, log, tanh, abs of warpattn, "
                          "and capture tensors as keyword arguments")  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A captured tensor as a function of indices: `table[b, k]` has one index per dimension; reads outside give 0.

    Two tables are equal when they wrap the same tensor object.
    """

    tensor: torch.Tensor

    def __getitem__(self, index: Any) -> Any:
        return load(self.tensor, *(index if isinstance(index, tuple) else (index,)))

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


def trace(fn: Callable[[], Any]) -> Program:
    """Run `fn()` and record it; fn returns one value or a tuple of them (symbols or numbers). Traces may nest."""
    recorder = Trace()
    token = running.set(recorder)
    try:
        result = fn()
        outputs = tuple(_node(value) for value in (result if isinstance(result, tuple) else (result,)))
    finally:
        running.reset(token)
    return Program(outputs, tuple(recorder.tensors))


def symbol(name: str, dtype: str = "int") -> Expr:
    """Return a symbol, whose value the environment of `evaluate` or the kernel supplies under `name`."""
    return Expr(make("sym", dtype, name))


def symbols(*names: str) -> list[Expr]:
    """Return several int symbols."""
    return [Expr(node) for node in [make("sym", "int", name) for name in names]]


def load(tensor: torch.Tensor, *index: Any) -> Any:
    """Element of `tensor` at one int index per dimension; 0 (False) where an index is outside its dimension.

    Inside a trace the tensor is registered and the result is a symbol; otherwise indices are ints or int tensors that
    broadcast, and so is the result. Raises AttentionError for a wrong number or kind of indices.
    """
    if (fault := tensor_fault(tensor)) is not None:
        raise user_error(f"a captured tensor {fault.what}", f"it {fault.rule}")
    if len(index) != tensor.ndim:
        raise user_error(f"a captured tensor of shape {tuple(tensor.shape)} is read with {len(index)} indices",
                          "give one index per dimension")  # fmt: skip
    recorder = running.get()
    if recorder is None and not any(isinstance(i, Expr) for i in index):
        return eager.read(tensor, index)
    nodes = [_node(i) for i in index]
    if recorder is None or any(node.dtype not in _INTS for node in nodes):
        kinds = ", ".join(node.dtype for node in nodes)
        raise user_error(f"a captured tensor is read with indices ({kinds})", "indices must be ints, inside a trace")
    if tensor.is_complex():
        raise user_error(f"a captured tensor has dtype {tensor.dtype}", "capture bool, integer or real tensors")
    dtype = {torch.bool: "bool", torch.int64: "int64"}.get(tensor.dtype, "int")
    return Expr(make("load", "float" if tensor.is_floating_point() else dtype, recorder.slot(tensor), *nodes))


def where(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where `condition`, else `no`. Symbols, numbers or tensors."""
    if not _has_symbol(condition, yes, no):
        return eager.where(condition, yes, no)
    test = _node(condition)
    if test.dtype != "bool":
        raise user_error(f"the condition of where() is {test.dtype}", "it must be bool, such as a comparison")
    left, right = _common((yes, no))
    return Expr(build("where", left.dtype, test, left, right))


def minimum(a: Any, b: Any) -> Any:
    """The smaller one. Symbols, numbers or tensors."""
    return _arithmetic("minimum", a, b) if _has_symbol(a, b) else eager.minimum(a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger one. Symbols, numbers or tensors."""
    return _arithmetic("maximum", a, b) if _has_symbol(a, b) else eager.maximum(a, b)


def exp(x: Any) -> Any:
    """Exponential function, a float. Symbols, numbers or tensors."""
    return _float_op("exp", x) if _has_symbol(x) else eager.exp(x)


def log(x: Any) -> Any:
    """Natural logarithm, a float; -inf at 0, nan below. Symbols, numbers or tensors."""
    return _float_op("log", x) if _has_symbol(x) else eager.log(x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent, a float. Symbols, numbers or tensors."""
    return _float_op("tanh", x) if _has_symbol(x) else eager.tanh(x)


def to_float(x: Any) -> Any:
    """`x` as a float. Symbols, numbers or tensors (to fp32 unless they are floating already)."""
    return Expr(cast(_node(x), "float")) if _has_symbol(x) else eager.to_float(x)


def saturated(x: Any) -> Any:
    """Clamp a 64-bit int to 32 bits. Symbols, numbers or tensors."""
    if isinstance(x, Expr) and x.dtype != "int64":
        return x
    low, high = INT32
    x = minimum(maximum(x, low), high)
    return Expr(cast(x.node, "int")) if isinstance(x, Expr) else x


def to_int(x: Any) -> Any:
    """`x` as an int, cut towards zero, to 32 bits at most; nan gives 0. Symbols, numbers or tensors."""
    if not _has_symbol(x):
        return eager.to_int(x)
    node = _node(x)
    return Expr(node if node.dtype == "int64" else cast(node, "int"))


def user_result_error(fn: Callable[..., Any], got: Any, rule: str) -> AttentionError:
    """Return the error for a user's function whose result breaks `rule`."""
    kind = f"a symbol of dtype {got.dtype}" if isinstance(got, Expr) else of_type(got)
    return AttentionError(f"{line_of(fn)}: {getattr(fn, '__qualname__', fn)} returned {kind}; {rule}")


def _has_symbol(*values: Any) -> bool:
    return any(isinstance(value, Expr) for value in values)


def _node(value: Any) -> Node:
    if isinstance(value, Expr):
        return value.node
    if isinstance(value, bool):
        return const(value, "bool")
    if isinstance(value, int):
        return whole_number(value)
    if isinstance(value, float):
        return const(value, "float")
    if isinstance(value, torch.SymInt):  # a dynamic size of torch.compile: the graph is specialised to it
        return whole_number(int(value))
    if isinstance(value, torch.Tensor | Table):
        how = "give it one index per dimension" if value.shape else "read its number as name[()]"
        raise user_error(f"a whole tensor of shape {tuple(value.shape)} meets a symbol",
                          f"capture it as a keyword argument and {how}")  # fmt: skip
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _node(value.item())
    raise user_error(f"{of_type(value)} meets a symbol", "operands are symbols and numbers")


def _common(values: tuple[Any, ...], least: str = "bool") -> list[Node]:
    """Return the nodes of `values`, cast to the widest of their dtypes, at least `least`."""
    nodes = [_node(value) for value in values]
    dtypes = {least, *[node.dtype for node in nodes]}
    if len(dtypes) == 1:
        return nodes
    dtype = max(dtypes, key=_RANK.__getitem__)
    return [cast(node, dtype) for node in nodes]


def _arithmetic(op: str, *values: Any) -> Expr:
    nodes = wide_enough(op, _common(values, "int"))
    return Expr(build(op, nodes[0].dtype, *nodes))


def _division(op: str, a: Any, b: Any) -> Expr:
    """`a // b` or `a % b`; of ints, 0 or `a` where b is 0."""
    left, right = _common((a, b), "int")
    if left.dtype == "float" or never_zero(right):
        return _arithmetic(op, Expr(left), Expr(right))
    divisor = Expr(right)
    result = _arithmetic(op, Expr(left), where(divisor == 0, 1, divisor))
    return where(divisor == 0, 0 if op == "floordiv" else Expr(left), result)


def _float_op(op: str, *values: Any) -> Expr:
    return Expr(build(op, "float", *_common(values, "float")))


def _power(base: Expr, exponent: Any) -> Any:
    """`base ** exponent`: products for an int up to 64, else exp(log(base) * exponent), nan for a negative base."""
    if type(exponent) is not int or abs(exponent) > 64:
        return exp(log(base) * exponent)
    if exponent < 0:
        return 1.0 / _power(base, -exponent)
    if exponent < 2:
        return base if exponent else Expr(const(1, base.dtype if base.dtype != "bool" else "int"))
    half = _power(base, exponent // 2)
    return half * half * base if exponent % 2 else half * half


def _compare(op: str, *values: Any) -> Expr:
    return Expr(build(op, "bool", *_common(values, "bool" if op in ("eq", "ne") else "int")))


def _bitwise(op: str, *values: Any) -> Expr:
    nodes = _without_floats(op, _common(values))
    return Expr(build(op, nodes[0].dtype, *nodes))


def _shift(op: str, *values: Any) -> Expr:
    """`a << b` or `a >> b`. By a negative number, or all bits and more: 0, and `>>` of a number below 0 gives -1."""
    nodes = _without_floats(op, _common(values, "int"))
    left, count = wide_enough(op, nodes) if op == "shl" else nodes
    bits = 64 if left.dtype == "int64" else 32
    if is_below(count, bits):
        return Expr(build(op, left.dtype, left, count))
    outside = (Expr(count) < 0) | (Expr(count) >= bits)
    shifted = Expr(build(op, left.dtype, left, _node(where(outside, bits - 1, Expr(count)))))
    return where(outside, 0, shifted) if op == "shl" else shifted


def _without_floats(op: str, nodes: list[Node]) -> list[Node]:
    if nodes[0].dtype == "float":
        raise user_error(f"the operator {op} got a float", "& | ^ ~ << >> take bools or ints")
    return nodes
