"""Compiles traced masks and scores: nodes of the index language become the source of a Gluon function.

The function computes each distinct node once, in the order of the trace. Values that depend on q alone stay [M, 1]
and on k alone [1, N]; only where both meet is there work per element. Captured tensors arrive in one flat tuple:
pointer, sizes, strides of the first, then of the second, and so on. Reads outside a tensor give 0.

A tile's keys may be given in two parts: k = first + column, with columns that are numbers in the code of each register.
Then `k <= x` becomes `column <= x - first`, an instruction with a number and no register for k.
"""

import hashlib
import linecache
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warpattn.language.nodes import Node, postorder

MASK_SYMBOLS = ("b", "h", "q", "k", "len_q", "len_k")
SPAN_SYMBOLS = ("b", "h", "q_lo", "q_hi", "len_q", "len_k")
SCORE_SYMBOLS = ("s", *MASK_SYMBOLS)
INDEX_SYMBOLS = ("s", *MASK_SYMBOLS)  # of a function whose value has the shape of what it reads, not that of the scores

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip
_CALLS = {
    "where": "gl.where", "minimum": "gl.minimum", "maximum": "gl.maximum", "abs": "gl.abs", "exp": "gl.exp",
    "log": "gl.log", "tanh": "tanh", "floordiv": "floor_div", "mod": "floor_mod",
}
_FLOAT_CALLS = {"floordiv": "float_floor_div", "mod": "float_floor_mod"}  # fmt: skip

_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_KINDS = {"int": "int32", "int64": "int64", "float": "float32"}
_K = Node(("sym", "int", "k"))


@gluon.jit
def floor_div(a, b):
    """Quotient rounded down, as in Python (the machine's rounds towards zero)."""
    quotient = a // b
    rest = a - quotient * b
    return gl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)


@gluon.jit
def floor_mod(a, b):
    """Remainder with the sign of the divisor, as in Python."""
    return a - floor_div(a, b) * b


@gluon.jit
def float_floor_div(a, b):
    """Quotient rounded down, as torch's; of a division by 0 an infinity or nan."""
    rest = a % b
    quotient = (a - rest) / b
    quotient = gl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1.0, quotient)
    return gl.where(b == 0, a / b, gl.floor(quotient + 0.5))


@gluon.jit
def float_floor_mod(a, b):
    """Remainder with the sign of the divisor, as torch's."""
    rest = a % b
    return gl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@gluon.jit
def tanh(x):
    """Hyperbolic tangent by the special-function unit (absolute error below 2^-10.9, PTX ISA tanh.approx)."""
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


class Arithmetic(NamedTuple):
    """The Gluon functions of an architecture for operations of several instructions."""

    tanh: Any
    floor_div: Any
    floor_mod: Any


_FLOAT_DIVISIONS = {"float_floor_div": float_floor_div, "float_floor_mod": float_floor_mod}
NVIDIA = Arithmetic(tanh, floor_div, floor_mod)


def compile_function(
    outputs: tuple[Node, ...], symbols: tuple[str, ...], ranks: tuple[int, ...], arithmetic: Arithmetic = NVIDIA,
    split_keys: bool = False,
):  # fmt: skip
    """The Gluon function of `symbols` and the captured tensors' tuple that returns `outputs`.

    One output is returned as it is (any shape), several as a tuple of scalars. `ranks` are the tensors' ranks;
    `arithmetic` is the architecture's. With `split_keys` the argument k is (k, column, first).
    """
    lines: list[str] = []
    names: dict[int, str] = {}
    of_keys: set[int] = set()  # nodes that depend on k
    for node in postorder(outputs):
        if node == _K or any(id(operand) in of_keys for operand in node.operands):
            of_keys.add(id(node))
        text = (_key_comparison(node, names, of_keys) if split_keys else None) or _expression(node, names, ranks)
        if node.op in ("const", "sym"):
            names[id(node)] = text
        else:
            names[id(node)] = f"t{len(lines)}"
            lines.append(f"    t{len(lines)} = {text}")
    results = [names[id(node)] for node in outputs]
    if symbols is SCORE_SYMBOLS and not any(node.op == "sym" and node.value == "s" for node in postorder(outputs)):
        results = [f"gl.where(s == s, {result}, {result})" for result in results]  # in the shape of the scores
    if len(results) > 1:
        results = [f"gl.to_tensor({result})" for result in results]
    lines.append(f"    return {', '.join(results)}")
    return _function(symbols, "\n".join(lines), arithmetic)


def _function(symbols: tuple[str, ...], body: str, arithmetic: Arithmetic):
    """A jitted function from source; Triton reads it back through linecache."""
    name = f"index_function_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    source = f"def {name}({', '.join(symbols)}, args):\n{body}\n"
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"gl": gl, **_FLOAT_DIVISIONS, **arithmetic._asdict(), "__name__": __name__}
    exec(compile(source, filename, "exec"), namespace)  # noqa: S102
    return gluon.jit(namespace[name])


def _key_comparison(node: Node, names: dict[int, str], of_keys: set[int]) -> str | None:
    """The text of k itself where it is split, and of its comparison with what does not depend on it, else None. No key
    is below 0, so that -1 may replace what is less, and the difference does not overflow."""
    if node == _K:
        return "k[0]"
    if node.op not in _COMPARISONS:
        return None
    left, right = node.operands
    if (left == _K) == (right == _K):
        return None
    other = right if left == _K else left
    if id(other) in of_keys:
        return None
    bound = f"(gl.maximum(gl.to_tensor({names[id(other)]}), -1) - k[2])"
    sides = ("k[1]", bound) if left == _K else (bound, "k[1]")
    return f" {_INFIX[node.op]} ".join(sides)


def _expression(node: Node, names: dict[int, str], ranks: tuple[int, ...]) -> str:
    op, dtype = node.op, node.dtype
    if op == "const":
        return _constant(node.value, dtype)
    if op == "sym":
        return node.value
    args = [names[id(operand)] for operand in node.operands]
    if op == "load":
        return _load(node.value, dtype, args, ranks)
    if dtype == "float" and op in _FLOAT_CALLS:
        return f"{_FLOAT_CALLS[op]}({', '.join(args)})"
    if op in ("floordiv", "mod") and _is_power_of_two(divisor := node.operands[1]):
        bits = divisor.value.bit_length() - 1
        return f"{args[0]} >> {bits}" if op == "floordiv" else f"{args[0]} & {divisor.value - 1}"
    if op in _INFIX:
        return f"{args[0]} {_INFIX[op]} {args[1]}"
    if op in _CALLS:
        return f"{_CALLS[op]}({', '.join(args)})"
    if op == "neg":
        return f"-{args[0]}"
    if op == "not":
        return f"{args[0]} == 0" if dtype == "bool" else f"~{args[0]}"
    return f"gl.to_tensor({args[0]}).to(gl.{_KINDS[op]})"


def _constant(value: Any, dtype: str) -> str:
    if dtype == "int64":
        return f"gl.to_tensor({value!r}).to(gl.int64)"
    if dtype == "float" and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    return f"({value!r})"


def _load(slot: int, dtype: str, index: list[str], ranks: tuple[int, ...]) -> str:
    base = sum(1 + 2 * rank for rank in ranks[:slot])
    rank = ranks[slot]
    offset = " + ".join(f"gl.to_tensor({i}).to(gl.int64) * args[{base + 1 + rank + d}]" for d, i in enumerate(index))
    inside = " & ".join(f"({i} >= 0) & ({i} < args[{base + 1 + d}])" for d, i in enumerate(index))
    where = f"args[{base}] + ({offset}), mask={inside}, other=0" if index else f"args[{base}]"
    value = f"gl.load({where})"
    return f"{value} != 0" if dtype == "bool" else f"{value}.to(gl.{_KINDS[dtype]})"


def _is_power_of_two(node: Node) -> bool:
    value = node.value if node.is_constant else 0
    return isinstance(value, int) and value > 0 and value & (value - 1) == 0
