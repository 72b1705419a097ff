"""attention inside of torch.compile(fullgraph=True): values, changes, errors, and what the operator's text can say."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import partial

import pytest
import torch

import warpattn as wa
from tests.cases import MASKS, SCORES, Case, Maker
from tests.drawn import drawn
from warpattn.language.nodes import Program, ProgramKey
from warpattn.runtime.torch_op import operators
from warpattn.runtime.torch_op.program import replay

CASE = Case(seq_q=40, seq_k=50, heads_q=4, heads_kv=2)
Q, K, V = torch.randn(2, 40, 4, 16), torch.randn(2, 50, 2, 16), torch.randn(2, 50, 2, 24)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled(fn, backend="aot_eager"):  # type: ignore[no-untyped-def]
    return torch.compile(fn, fullgraph=True, backend=backend)


def close(found, expected) -> None:  # type: ignore[no-untyped-def]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# Each kind of saying a mask once; the others are these with other numbers, or two of them at a time.
DRAWN = ("none", "padding", "custom", "causal-added")


@pytest.mark.parametrize("name", drawn(MASKS, DRAWN))
def test_masks_from_outside(name):
    mask = MASKS[name](Maker(CASE, "cpu"))
    fn = compiled(lambda q: wa.attention(q, K, V, mask=mask) + 1)
    for q in (Q, Q * 2):
        close(fn(q), wa.attention(q, K, V, mask=mask) + 1)


@pytest.mark.parametrize("name", drawn(SCORES, ["custom", "alibi-slopes"]))
def test_scores_from_outside(name):
    score = SCORES[name](Maker(CASE, "cpu"))
    fn = compiled(lambda q: wa.attention(q, K, V, score=score, mask=wa.Causal(), return_lse=True))
    close(fn(Q), wa.attention(Q, K, V, score=score, mask=wa.Causal(), return_lse=True))


LENGTHS, IDS, GAIN = torch.tensor([20, 50]), torch.arange(50) // 9, torch.rand(4)
SINKS, BIAS, ADDED = torch.randn(4), torch.randn(40, 50), torch.randn(1, 40, 50)
INSIDE = {
    "masks": lambda q: wa.attention(q, K, V, mask=wa.SlidingWindow(9) & wa.Causal() | wa.Chunked(5)),
    "padding": lambda q: wa.attention(q, K, V, mask=wa.Padding(LENGTHS)),
    "documents": lambda q: wa.attention(q, K, V, mask=wa.Document(IDS) & wa.Prefix(LENGTHS)),
    "additive": lambda q: wa.attention(q, K, V, mask=wa.Materialized(ADDED) & wa.Causal()),
    "scores": lambda q: wa.attention(q, K, V, score=wa.SoftCap(3.0) | wa.ALiBi(4) | wa.ALiBi(GAIN) | wa.Bias(BIAS)),
    "sinks": lambda q: wa.attention(q, K, V, sinks=SINKS, scale=0.3),
    "custom": lambda q: wa.attention(
        q,
        K,
        V,
        mask=wa.CustomMask(lambda b, h, q, k, t, n: (k < t[b]) | (k > n), t=LENGTHS, n=45),
        score=wa.CustomScore(lambda s, b, h, q, k, g: s * g[h] + wa.exp(-abs(q - k) / 9), g=GAIN),
    ),
    "lse": lambda q: wa.attention(q, K, V, return_lse=True),
    "out": lambda q: wa.attention(q, K, V, out=torch.empty(2, 40, 4, 24)) * 2,
    "half": lambda q: wa.attention(q.bfloat16(), K.bfloat16(), V.bfloat16(), return_lse=True),
    "double": lambda q: wa.attention(q.double(), K.double(), V.double(), return_lse=True),
    "no keys": lambda q: wa.attention(q, K[:, :0], V[:, :0], return_lse=True),
    "no queries": lambda q: wa.attention(q[:, :0], K, V, return_lse=True),
    "transposed": lambda q: wa.attention(q.transpose(1, 2).contiguous().transpose(1, 2), K, V),
    "twice": lambda q: wa.attention(wa.attention(q, K, K), K, V, mask=wa.Causal()),
}
INSIDE_DRAWN = ("padding", "documents", "scores", "sinks", "custom", "out", "no keys", "twice")


@pytest.mark.parametrize("name", drawn(INSIDE, INSIDE_DRAWN))
def test_values_made_inside_of_the_graph(name):
    fn = compiled(INSIDE[name])
    for q in (Q, Q + 1):
        close(fn(q), INSIDE[name](q))


NUMBERS = {
    "window": (lambda n: {"mask": wa.SlidingWindow(n)}, (3, 4, 5)),
    "captured": (lambda n: {"mask": wa.CustomMask(lambda b, h, q, k, n: k < n, n=n)}, (3, 4, 5)),
    "cap": (lambda n: {"score": wa.SoftCap(n)}, (0.3, 0.4, 0.5)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_masks_and_scores_may_change(name):
    """torch keeps a number open from its second value on."""
    options, values = NUMBERS[name]
    fn = compiled(lambda q, n: wa.attention(q, K, V, **options(n)))
    for n in values:
        close(fn(Q, n), wa.attention(Q, K, V, **options(n)))


@pytest.mark.parametrize("name", NUMBERS)
def test_sizes_that_torch_keeps_open_may_be_such_numbers(name):
    options, _ = NUMBERS[name]
    fn = torch.compile(
        lambda x: wa.attention(x, x, x, **options(x.shape[1])), fullgraph=True, dynamic=True, backend="eager"
    )
    for size in (12, 20):
        x = torch.randn(1, size, 2, 16)
        close(fn(x), wa.attention(x, x, x, **options(size)))


def nested(n):
    def inner(k):
        return k < n

    return lambda b, h, q, k: inner(k) & (q >= k)


HELD = {
    "closure": lambda n: {"mask": wa.CustomMask(lambda b, h, q, k: k < n)},
    "score": lambda n: {"score": wa.CustomScore(lambda s, b, h, q, k: s * n)},
    "nested": lambda n: {"mask": wa.CustomMask(nested(n)) | wa.SlidingWindow(2)},
    "default": lambda n: {"mask": wa.CustomMask(lambda b, h, q, k, n=n: k < n)},
    "keyword": lambda n: {"mask": wa.CustomMask(lambda b, h, q, k, *, n=n: k < n)},
    "partial": lambda n: {"mask": wa.CustomMask(partial(lambda n, b, h, q, k, *, m: (k < n) & (q > m), n, m=n // 4))},
    "tuple": lambda n: {"mask": wa.CustomMask(lambda b, h, q, k, held=(n, {"half": n // 2}): k < held[1]["half"])},
}


@pytest.mark.parametrize("name", HELD)
def test_functions_may_hold_sizes_that_torch_keeps_open(name):
    options = HELD[name]
    fn = torch.compile(
        lambda x: wa.attention(x, x, x, **options(x.shape[1] // 2)), fullgraph=True, dynamic=True, backend="eager"
    )
    for size in (12, 20):
        x = torch.randn(1, size, 2, 16)
        close(fn(x), wa.attention(x, x, x, **options(size // 2)))


class Seen:
    """A mask's function that is an object."""

    def __init__(self, seen):  # type: ignore[no-untyped-def]
        self.seen = seen

    def __call__(self, b, h, q, k):  # type: ignore[no-untyped-def]
        return self.seen[k]


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda t: lambda b, h, q, k: t[k], "reads t"),
        (lambda t: partial(lambda b, h, q, k, seen: seen[k], seen=t), "reads seen"),
        (lambda t: Seen(t), "is a Seen"),
    ],
)
def test_a_function_that_holds_a_tensor_of_the_graph_is_one_sentence(function, held):
    message = f"the function of a CustomMask {held}.*; pass tensors and numbers by name, as in CustomMask.fn, "
    with pytest.raises(wa.AttentionError, match=message):
        compiled(lambda q: wa.attention(q, K, V, mask=wa.CustomMask(function(q[0, :, 0, 0] > 0))))(Q)


def test_a_number_that_is_traced_as_a_tensor_is_one_sentence():
    with pytest.raises(wa.AttentionError, match=r"scale is a torch.float32 tensor of shape \(\); scale must be"):
        compiled(lambda q, scale: wa.attention(q, K, V, scale=scale))(Q, torch.tensor(0.3))


def test_tensors_of_8_bits_made_inside_of_the_graph():
    def call(q):
        return wa.attention(q, wa.quantize(K), wa.quantize(V, scale=torch.tensor(0.5)))

    close(compiled(call)(Q), call(Q))


ROWS, KEYS = torch.randn(45, 4, 16), torch.randn(60, 2, 16)
CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in ((0, 20, 20, 45), (0, 25, 30, 60)))
CU_MIXED = torch.tensor([0, 1, 9], dtype=torch.int32)
STEP, PAGES = torch.randn(2, 3, 4, 16), torch.randn(6, 4, 2, 16)
TABLE, USED = torch.tensor([[5, 1, 0], [2, 3, 4]], dtype=torch.int32), torch.tensor([9, 6], dtype=torch.int32)
OUTSIDE = (wa.Ragged(CU_Q, CU_K, 25, 30), wa.PagedKV(PAGES, PAGES * 2, TABLE, USED))
OTHER_KINDS = {
    "ragged": lambda q, x: wa.attention_varlen(q, KEYS, KEYS, wa.Ragged(CU_Q, CU_K), mask=wa.Causal()),
    "ragged, lse": lambda q, x: wa.attention_varlen(q, KEYS, KEYS, OUTSIDE[0], score=wa.SoftCap(2.0), return_lse=True),
    "ragged, shared": lambda q, x: wa.attention_varlen(q, q[:, :2], q[:, :2], wa.Ragged(CU_Q, max_q=25), sinks=SINKS),
    "ragged, out": lambda q, x: wa.attention_varlen(q, KEYS, KEYS, OUTSIDE[0], out=torch.empty(45, 4, 16)) * 2,
    "paged": lambda q, x: wa.attention_paged(x, wa.PagedKV(PAGES, PAGES * 2, TABLE, USED), mask=wa.SlidingWindow(4)),
    "paged, ragged": lambda q, x: wa.attention_paged(
        q[:9], OUTSIDE[1], wa.Ragged(CU_MIXED, max_q=8), mask=wa.Causal(), return_lse=True
    ),
    "paged, lse": lambda q, x: wa.attention_paged(x, OUTSIDE[1], sinks=SINKS, scale=0.2, return_lse=True),
}


@pytest.mark.parametrize("name", drawn(OTHER_KINDS, ["ragged, out", "ragged, shared", "paged, ragged", "paged"]))
def test_ragged_and_paged(name):
    fn = compiled(OTHER_KINDS[name])
    for factor in (1, 2):
        close(fn(ROWS * factor, STEP * factor), OTHER_KINDS[name](ROWS * factor, STEP * factor))


def test_lengths_and_tables_may_change():
    def step(q, pages, table, lengths):
        return wa.attention_paged(q, wa.PagedKV(pages, pages * 2, table, lengths), mask=wa.Causal(), return_lse=True)

    fn = compiled(step)
    for table, lengths in ((TABLE, USED), (TABLE.flip(0), USED - 6), (TABLE[:, :2], USED - 3)):
        close(fn(STEP, PAGES, table, lengths), step(STEP, PAGES, table, lengths))


def test_totals_may_change():
    def call(q, k, cu_q, cu_k):
        return wa.attention_varlen(q, k, k, wa.Ragged(cu_q, cu_k), mask=wa.Causal(), return_lse=True)

    fn = compiled(call)
    for rows, keys in ((45, 60), (30, 60), (21, 44)):
        cu_q, cu_k = CU_Q.clamp_max(rows), CU_K.clamp_max(keys)
        close(fn(ROWS[:rows], KEYS[:keys], cu_q, cu_k), call(ROWS[:rows], KEYS[:keys], cu_q, cu_k))


def test_broken_rules_of_other_kinds_are_raised_as_they_are():
    with pytest.raises(wa.AttentionError, match="cu_q"):
        compiled(lambda q: wa.attention_varlen(q, KEYS, KEYS, wa.Ragged(CU_Q.long(), CU_K), return_lse=True))(ROWS)
    with pytest.raises(wa.AttentionError, match="block_table"):
        compiled(lambda q: wa.attention_paged(q, wa.PagedKV(PAGES, PAGES, TABLE[:1], USED)))(STEP)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", drawn(["custom", "lse", "out"], ["lse"]))
def test_inductor(name):
    try:
        found = compiled(INSIDE[name], "inductor")(Q)
    except Exception as error:
        if "No working C++ compiler" in str(error):
            pytest.skip(f"inductor has no C++ compiler here: {str(error).splitlines()[0]}")
        raise
    close(found, INSIDE[name](Q))


def test_captured_tensors_may_change():
    lengths = torch.tensor([10, 20])
    mask = wa.Padding(lengths)
    fn = compiled(lambda q: wa.attention(q, K, V, mask=mask))
    for value in (10, 0, 50):
        lengths.fill_(value)
        close(fn(Q), wa.attention(Q, K, V, mask=mask))


CHANGING = {
    "mask": lambda n: (wa.Causal() if n % 8 else wa.Chunked(5), None),
    "window": lambda n: (wa.SlidingWindow(n // 2), wa.SoftCap(n / 9)),
    "documents": lambda n: (wa.Document(torch.arange(n) // 4), None),
    "bias": lambda n: (None, wa.Bias(torch.randn(n, n))),
    "padding": lambda n: (wa.Padding(torch.tensor([1, n])), wa.ALiBi(torch.rand(4))),
}


@pytest.mark.parametrize("name", drawn(CHANGING, ["padding"]))
def test_lengths_masks_and_scales_may_change(name):
    fn = compiled(lambda x, mask, score, scale: wa.attention(x, x, x, mask=mask, score=score, scale=scale))
    for length in (8, 12, 31):
        x = torch.randn(2, length, 4, 16)
        mask, score = CHANGING[name](length)
        close(fn(x, mask, score, 1 / length), wa.attention(x, x, x, mask=mask, score=score, scale=1 / length))


def test_sinks_may_change():
    sinks = torch.zeros(4)
    fn = compiled(lambda q, sinks: wa.attention(q, K, V, sinks=sinks))
    for value in (0.0, 5.0):
        close(fn(Q, sinks + value), wa.attention(Q, K, V, sinks=sinks + value))


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_broken_rules_are_raised_as_they_are(backend):
    with pytest.raises(wa.AttentionError, match="v must have as many keys as k, 50"):
        compiled(lambda q: wa.attention(q, K, V[:, :3]), backend)(Q)
    with pytest.raises(wa.AttentionError, match="2 rules are broken"):
        compiled(lambda q: wa.attention(q, K, V[:, :3], sinks=torch.zeros(9), return_lse=True), backend)(Q)


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_programs_survive_as_text(name):
    mask = MASKS[name](Maker(CASE, "cpu"))
    assert mask is not None
    program = mask.program()
    again = replay(ProgramKey(*ast.literal_eval(repr(program.key))))
    assert Program(tuple(again), program.tensors).key == program.key


def test_odd_constants_survive_as_text():
    program = wa.CustomScore(
        lambda s, b, h, q, k: wa.where(q > k, s * -0.0 + 1e-30, float("-inf")) + wa.where(k > 3, float("nan"), 2.0)
    ).program()
    again = replay(ProgramKey(*ast.literal_eval(repr(program.key))))
    assert Program(tuple(again), ()).key == program.key


def test_the_operator_keeps_its_promises():
    text = repr((wa.Causal().program().key, None, (0.25, True, "auto", None), ("dense", (), ())))
    torch.library.opcheck(operators._attention, (Q, K, V, SINKS, [], [], [], text))


def test_the_operator_keeps_its_promises_for_other_sequences():
    ragged, paged = ("ragged", (25, None), ("seq.cu_q", "seq.cu_k")), ("paged", (), ("kv.block_table", "kv.lengths"))
    text = repr((wa.Causal().program().key, None, (0.25, True, "auto", None), ragged))
    torch.library.opcheck(operators._attention, (ROWS, KEYS, KEYS, None, [CU_Q, CU_K], [], [], text))
    text = repr((wa.Causal().program().key, None, (0.25, False, "auto", None), paged))
    torch.library.opcheck(operators._attention, (STEP, PAGES, PAGES, SINKS, [TABLE, USED], [], [], text))


def test_importing_warpattn_does_not_import_dynamo():
    loaded = "print(*(name in sys.modules for name in ('torch._dynamo', 'warpattn.runtime.torch_op.operators')))"
    program = f"import sys, warpattn; {loaded}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
