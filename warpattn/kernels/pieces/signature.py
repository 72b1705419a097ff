"""What Triton compiles for a launch: its kernel with the types of the arguments, constants, and masks and scores as
functions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental.gluon import GluonASTSource

from warpattn.errors import AttentionError
from warpattn.language.nodes import SPAN, Node, Program, reads
from warpattn.problem.argument_types import NOTHING, argument_types
from warpattn.problem.element import ELEMENTS, element_of

from .codegen import MASK_SYMBOLS, NVIDIA, SCORE_SYMBOLS, SPAN_SYMBOLS, Arithmetic, compile_function

ALIGNED = [["tt.divisibility", 16]]  # of a pointer: to a multiple of 16 bytes


def kernel_source(
    kernel: Any, args: Mapping[str, Any], constants: Mapping[str, Any], given: Mapping[str, Any] = NOTHING,
    hints: Mapping[str, Any] = NOTHING,
) -> GluonASTSource:  # fmt: skip
    """A kernel with the types of its launch's arguments, in its own order, and its constants. `given`: types that the
    arguments do not say, `hints`: attributes of pointers, both by path, such as "k_source.map"."""
    types = argument_types(args, given) | dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    attributes = {_position(signature, path): hint for path, hint in hints.items()}
    return GluonASTSource(kernel, signature, constants, attributes)


def _position(signature: Mapping[str, Any], path: str) -> tuple[int, ...]:
    """A path as indices."""
    name, *fields = path.split(".")
    position, part = [list(signature).index(name)], signature[name]
    for field in fields:
        position.append(part._fields.index(field) if hasattr(part, "_fields") else int(field))
        part = part[position[-1]]
    return tuple(position)


def captured_types(mask: Program, score: Program | None, backend: str) -> dict[str, tuple[str, ...]]:
    """Types of the arguments that hold captured tensors."""
    return {"mask_args": tensor_signature(mask, backend), "score_args": tensor_signature(score, backend)}


def tensor_signature(program: Program | None, backend: str) -> tuple[str, ...]:
    """Kernel types of a program's captured tensors: pointer, sizes, strides of each."""
    signature: list[str] = []
    for tensor in program.tensors if program is not None else ():
        if all(tensor.dtype is not element.dtype for element in ELEMENTS):
            listed = ", ".join(str(element.dtype).removeprefix("torch.") for element in ELEMENTS)
            raise AttentionError(f"a captured tensor has dtype {tensor.dtype}; the {backend} backend reads {listed}")
        signature += [element_of(tensor.dtype).pointer, *["i32"] * tensor.ndim, *["i64"] * tensor.ndim]
    return tuple(signature)


_ALL_KEYS = (*[Node(("const", "int", 0))] * 3, Node(("sym", "int", "len_k")))


def packed_span(mask: Program) -> Program:
    """The mask's program for a tile that holds several heads: one span for all of them, every key if it reads the head.

    `keep` still decides about each key.
    """
    keep = mask.outputs[0]
    return Program((keep, *_ALL_KEYS), mask.tensors) if "h" in reads(mask.key, SPAN).symbols else mask


@dataclass(frozen=True)
class ScoreFunction:
    """A score as a Gluon function of products times `before`, whose results are natural times 1 / `after`; None:
    products are scores, times the softmax scale, and may be any numbers."""

    function: Any
    before: float = 1.0
    after: float = 1.0


class Functions(NamedTuple):
    """A mask and a score as Gluon functions, see `Modifiers`; keep is None where every key is visible."""

    keep: Any
    hides_newer: bool
    span: Any
    score: ScoreFunction | None


def modifier_functions(
    keep_and_span: Program, score: Program | None, arithmetic: Arithmetic = NVIDIA, folds: bool = False,
    split_keys: bool = False,
) -> Functions:  # fmt: skip
    """The functions of a mask's program and a score's. With `folds` the factors of a soft-cap are left to the factors
    that scores have anyway: two multiplications less. `split_keys` of keep: see codegen."""
    ranks = tuple(tensor.ndim for tensor in keep_and_span.tensors)
    keep_node, *span_nodes = keep_and_span.outputs
    always = keep_node.is_constant and keep_node.value is True
    keep = None if always else compile_function((keep_node,), MASK_SYMBOLS, ranks, arithmetic, split_keys)
    span = compile_function(tuple(span_nodes), SPAN_SYMBOLS, ranks, arithmetic)
    if score is None or not score.outputs:
        return Functions(keep, hides_newer(keep_node), span, None if score is None else ScoreFunction(None))
    score_ranks = tuple(tensor.ndim for tensor in score.tensors)
    outputs, before, after = score.outputs, 1.0, 1.0
    cap = softcap_factors(*outputs) if folds else None
    if cap is not None:
        before, after = cap
        outputs = (Node(("tanh", "float", _S)),)
    function = compile_function(outputs, SCORE_SYMBOLS, score_ranks, arithmetic)
    return Functions(keep, hides_newer(keep_node), span, ScoreFunction(function, before, after))


_Q, _K = Node(("sym", "int", "q")), Node(("sym", "int", "k"))
_OLDER = (("le", _K, _Q), ("lt", _K, _Q), ("ge", _Q, _K), ("gt", _Q, _K))  # conditions without their dtype


def hides_newer(keep: Node) -> bool:
    """Whether a mask's condition is that a key is not after the query, alone or with others."""
    if keep.op in ("and", "or"):
        return (any if keep.op == "and" else all)(map(hides_newer, keep.operands))
    return (keep.op, *keep.operands) in _OLDER


class BackwardFunctions(NamedTuple):
    """`Functions` of a mask and a score, and the score's derivative as a Gluon function; None: 1."""

    keep: Any
    hides_newer: bool
    span: Any
    score: ScoreFunction | None
    slope: Any


def with_slope(functions: Functions, slope: Program | None, arithmetic: Arithmetic = NVIDIA) -> BackwardFunctions:
    """The functions of a backward, from those of its forward and the score's derivative."""
    if slope is None:
        return BackwardFunctions(*functions, None)
    ranks = tuple(tensor.ndim for tensor in slope.tensors)
    return BackwardFunctions(*functions, compile_function(slope.outputs, SCORE_SYMBOLS, ranks, arithmetic))


_S = Node(("sym", "float", "s"))


def softcap_factors(node: Node) -> tuple[float, float] | None:
    """(b, a) if a node is a * tanh(b * s) with positive numbers a and b."""
    outer = _scaled(node)
    if outer is None or outer.node.op != "tanh":
        return None
    inner = _scaled(*outer.node.operands)
    return (inner.factor, outer.factor) if inner is not None and inner.node == _S else None


class _Scaled(NamedTuple):
    """node * factor, with a positive number."""

    node: Node
    factor: float


def _scaled(node: Node) -> _Scaled | None:
    """The parts of such a product."""
    if node.op != "mul":
        return None
    scaled, factor = node.operands
    return _Scaled(scaled, factor.value) if factor.is_constant and factor.value > 0 else None
