"""Generated Gluon functions mean what the traced mask or score means: their source is run on tensors and compared.

The functions use only operators, casts and a handful of names of Gluon, which a stand-in gives the meaning they have on
the card. What the compiler makes of them is tested on the card (tests/gpu).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import warpattn as wa
from tests.cases import MASKS, SCORES, Case, Maker
from warpattn.language.evaluate import evaluate
from warpattn.language.nodes import Program

emit = pytest.importorskip("warpattn.kernels.pieces.codegen", exc_type=ImportError)

CASE = Case(seq_q=50, seq_k=70, heads_q=6, heads_kv=2)


class Pointer:
    """A captured tensor's address: adding an offset in elements gives one that can be loaded."""

    def __init__(self, storage: Tensor, offset: Any = 0) -> None:
        self.storage, self.offset = storage, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.storage, self.offset + offset)


def load(pointer: Pointer, mask: Any, other: int) -> Tensor:
    offset, mask = torch.as_tensor(pointer.offset), torch.as_tensor(mask)
    assert bool(((offset >= 0) & (offset < len(pointer.storage)))[mask].all()), "an unmasked read outside of the tensor"
    values = pointer.storage[torch.where(mask, offset, 0)]
    return torch.where(mask, values, torch.tensor(other, dtype=values.dtype))


STAND_IN = {
    "gl": SimpleNamespace(
        load=load,
        to_tensor=torch.as_tensor,
        where=lambda c, x, y: torch.where(torch.as_tensor(c), torch.as_tensor(x), torch.as_tensor(y)),
        minimum=lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)),
        maximum=lambda x, y: torch.maximum(torch.as_tensor(x), torch.as_tensor(y)),
        abs=torch.abs,
        exp=lambda x: torch.exp(torch.as_tensor(x)),
        log=lambda x: torch.log(torch.as_tensor(x)),
        int32=torch.int32,
        int64=torch.int64,
        float32=torch.float32,
        full=lambda shape, x, dtype: torch.full(shape, x, dtype=dtype),
    ),
    "tanh": torch.tanh,
    "floor_div": lambda x, y: torch.as_tensor(x) // y,
    "floor_mod": lambda x, y: torch.as_tensor(x) % y,
}


def run(
    outputs: tuple[Any, ...], symbols: tuple[str, ...], env: dict[str, Any], tensors: tuple[Tensor, ...],
    split_keys: bool = False,
) -> Any:  # fmt: skip
    """The generated function on tensors."""
    function = emit.compile_function(outputs, symbols, tuple(x.ndim for x in tensors), split_keys=split_keys).fn
    function.__globals__.update(STAND_IN)
    args: list[Any] = []
    for x in tensors:
        args += [
            Pointer(x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0), x.storage_offset())
        ]
        args += [*x.shape, *x.stride()]
    return function(*(env[name] for name in symbols), args)


def grid(b: int, h: int) -> dict[str, Any]:
    """Symbols of one head as a kernel sees them: rows [M, 1], keys [1, N], everything else one number."""
    shift = CASE.seq_k - CASE.seq_q
    return {
        "b": torch.tensor(b, dtype=torch.int32),
        "h": torch.tensor(h, dtype=torch.int32),
        "q": torch.arange(shift - 3, CASE.seq_k + 3, dtype=torch.int32)[:, None],
        "k": torch.arange(0, CASE.seq_k + 9, dtype=torch.int32)[None, :],
        "len_q": torch.tensor(CASE.seq_q, dtype=torch.int32),
        "len_k": torch.tensor(CASE.seq_k, dtype=torch.int32),
    }


def split(env: dict[str, Any]) -> dict[str, Any]:
    """The same with keys in two parts, as Hopper's prefill has them."""
    first = torch.tensor(48, dtype=torch.int32)
    return env | {"k": (env["k"], env["k"] - first, first)}


def same(found: Any, expected: Any) -> bool:
    found, expected = torch.broadcast_tensors(torch.as_tensor(found), torch.as_tensor(expected))
    if expected.is_floating_point():
        return torch.allclose(found.to(expected.dtype), expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    return torch.equal(found.to(expected.dtype), expected)


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_masks(name):
    mask = MASKS[name](Maker(CASE, "cpu"))
    assert mask is not None
    program = mask.program()
    for b, h in ((0, 0), (1, CASE.heads_q - 1)):
        env = grid(b, h)
        found = run((program.keep,), emit.MASK_SYMBOLS, env, program.tensors)
        assert same(found, evaluate(program.keep, env, program.tensors)), (b, h)
        found = run((program.keep,), emit.MASK_SYMBOLS, split(env), program.tensors, split_keys=True)
        assert same(found, evaluate(program.keep, env, program.tensors)), (b, h)
        for lo in range(CASE.seq_k - CASE.seq_q, CASE.seq_k, 16):
            tile = env | {"q_lo": torch.tensor(lo), "q_hi": torch.tensor(min(lo + 15, CASE.seq_k - 1))}
            found = run(tuple(program.span), emit.SPAN_SYMBOLS, tile, program.tensors)
            for mine, node in zip(found, program.span, strict=True):
                assert same(mine, evaluate(node, tile, program.tensors)), (b, h, lo)


EXTREMES = torch.tensor([-(2**31), -(2**31) + 1, -1, 0, 1, 60, 2**31 - 1], dtype=torch.int32)
COMPARED = {
    "below": lambda b, h, q, k, *, x: (k < x[q % 7]) | (x[q % 7] > k + 20),
    "at most": lambda b, h, q, k, *, x: (k <= x[q % 7]) & (x[q % 7] >= k),
    "above": lambda b, h, q, k, *, x: (k > x[q % 7]) ^ (x[b] < k),
    "at least": lambda b, h, q, k, *, x: (k >= x[q % 7]) & (q - 9 <= k),
    "equal": lambda b, h, q, k, *, x: (k == x[q % 7]) | (k == q) | (q != k),
    "numbers": lambda b, h, q, k, *, x: (k > -(2**31)) & (k < 2**31 - 1) & (k * 2 != k + x[5]),
}


@pytest.mark.parametrize("name", COMPARED)
def test_keys_in_two_parts_compare_as_whole_ones(name):
    """Whatever a key is compared with: the difference from a key must not overflow."""
    program = wa.CustomMask(COMPARED[name], x=EXTREMES).program()
    env = grid(0, 0) | {"q": torch.arange(0, 14, dtype=torch.int32)[:, None]}
    found = run((program.keep,), emit.MASK_SYMBOLS, split(env), program.tensors, split_keys=True)
    assert same(found, evaluate(program.keep, env, program.tensors))


@pytest.mark.parametrize("name", [name for name in SCORES if name != "none"])
def test_scores(name):
    score = SCORES[name](Maker(CASE, "cpu"))
    assert score is not None
    program = score.program()
    for b, h in ((0, 0), (1, CASE.heads_q - 1)):
        env = grid(b, h)
        env |= {"s": torch.randn(env["q"].shape[0], env["k"].shape[1])}
        found = run((program.out,), emit.SCORE_SYMBOLS, env, program.tensors)
        assert same(found, evaluate(program.out, env, program.tensors))


EXPRESSIONS = {
    "precedence": lambda s, b, h, q, k: s * (q + k) - (s - (q - (k - 3))) / (2.0 - (h - 5)),
    "negatives": lambda s, b, h, q, k: -(-(q - 30) - -7) * -1.5 + s - -2,
    "floor division": lambda s, b, h, q, k: wa.to_float((q - 40) // 7 + (q - 40) % 7 + (k - 9) // 8 + (k - 9) % 8),
    "division by a negative": lambda s, b, h, q, k: wa.to_float((q - 40) // -7 + (q - 40) % -4),
    "bits": lambda s, b, h, q, k: wa.to_float(((q & 12) | (k ^ 5)) + (q << 2) + (k >> 1) + ~q),
    "bools": lambda s, b, h, q, k: wa.where(~((q > k) & (h != 2)) | ((q == k) ^ (k < 4)), s, -s),
    "bools as numbers": lambda s, b, h, q, k: s + (q > k) * 2.0 + wa.to_float(q <= k),
    "functions": lambda s, b, h, q, k: wa.exp(-abs(s)) + wa.log(wa.to_float(k) + 1.0) + wa.tanh(s / 3),
    "extremes": lambda s, b, h, q, k: wa.maximum(wa.minimum(s, q), -k) + wa.minimum(q, 7),
    "infinities": lambda s, b, h, q, k: wa.where(q > k, s, float("-inf")),
    "small numbers": lambda s, b, h, q, k: s * 1e-30 + 1e20 * s - 2.5e-8,
    "casts": lambda s, b, h, q, k: s + wa.to_int(s * 3) + wa.to_float(wa.to_int(-s)),
    "a constant": lambda s, b, h, q, k: 3.5,
    "itself": lambda s, b, h, q, k: s,
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions(name):
    program = wa.CustomScore(EXPRESSIONS[name]).program()
    env = grid(1, 2)
    env |= {"s": torch.randn(env["q"].shape[0], env["k"].shape[1])}
    assert same(run((program.out,), emit.SCORE_SYMBOLS, env, ()), evaluate(program.out, env, ()))


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_captured_tensors_of_every_dtype_and_stride(dtype):
    table = (
        (torch.randn(9, 40, 3) * 4).to(dtype)[:, ::2, 1].T
    )  # [20, 9], strides (6, 120), not at the start of its memory
    other = torch.arange(5)

    def read(s, b, h, q, k, table, other):  # type: ignore[no-untyped-def]
        return s + table[q - 30, k - 40] + other[h] * table[k, b]  # mostly outside of the table

    program = wa.CustomScore(read, table=table, other=other).program()
    env = grid(1, 2)
    env |= {"s": torch.randn(env["q"].shape[0], env["k"].shape[1])}
    found = run((program.out,), emit.SCORE_SYMBOLS, env, program.tensors)
    assert same(found, evaluate(program.out, env, program.tensors))


@pytest.mark.parametrize("name", [name for name in SCORES if name != "none"])
def test_derivatives(name):
    """A score, its slope and its adjoints as one function, which computes what they share once."""
    score = SCORES[name](Maker(CASE, "cpu"))
    assert score is not None
    derivative = score.program().derivative
    outputs = (derivative.score, derivative.slope, *(adjoint.value for adjoint in derivative.adjoints))
    env = grid(1, CASE.heads_q - 1)
    env |= {"s": torch.randn(env["q"].shape[0], env["k"].shape[1])}
    found = run(outputs, emit.SCORE_SYMBOLS, env, derivative.tensors)
    for mine, node in zip(found, outputs, strict=True):
        assert same(mine, evaluate(node, env, derivative.tensors))


def test_equal_nodes_are_computed_once():
    program = wa.CustomScore(
        lambda s, b, h, q, k: s + wa.exp(wa.to_float(q - k)) * wa.exp(wa.to_float(q - k))
    ).program()
    function = emit.compile_function((program.out,), emit.SCORE_SYMBOLS, ())
    assert function.src.count("gl.exp") == 1


def test_the_name_of_a_function_follows_its_body():
    one, two, three = (
        emit.compile_function(wa.SlidingWindow(n).program().span, emit.SPAN_SYMBOLS, ()) for n in (3, 3, 4)
    )
    assert one.fn.__name__ == two.fn.__name__ != three.fn.__name__


def test_programs_with_one_key_have_one_source():
    """The disk cache knows a function by its key only."""
    for make in (lambda: wa.Padding(torch.tensor([1, 2])), lambda: wa.Causal() & wa.SlidingWindow(9)):
        sources = set()
        for _ in range(2):
            mask = make().program()
            program = Program((mask.keep, *mask.span), mask.tensors)
            assert program.key == mask.key
            sources.add(emit.compile_function(program.outputs, emit.SPAN_SYMBOLS, (1,)).src)
        assert len(sources) == 1
