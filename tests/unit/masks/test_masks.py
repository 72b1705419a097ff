"""Masks: `keep` against plain Python, `kv_span` against `keep`, for every mask and random combinations."""

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import warpattn.masks as wm
from warpattn.errors import AttentionError
from warpattn.language.evaluate import evaluate, evaluate_all
from warpattn.language.expr import Expr, exp, minimum, symbol, to_float, where
from warpattn.masks.base import InOrder
from warpattn.masks.documents import run_labels
from warpattn.scores import ALiBi, SoftCap

BATCH, HEADS = 2, 2
SHAPES = [(1, 1), (1, 6), (5, 5), (4, 9), (9, 4), (7, 1), (3, 0), (8, 8)]
FLOATS = torch.tensor([0.0, 1.5, -torch.inf])

CONTIGUOUS = torch.tensor([[7, 7, 7, 2, 2, 9, 9, 9, 9], [0, 0, 0, 0, 0, 0, 5, -3, -3]], dtype=torch.int64)
SCATTERED = torch.tensor([1, 3, 1, 1, 2, 3, 2, 2], dtype=torch.int32)
LENGTHS = torch.tensor([3, 7], dtype=torch.int32)
EVERY_SECOND = torch.arange(BATCH * HEADS * 5 * 8).view(BATCH, HEADS, 5, 8) % 3 != 1


def materialized_truth(mask):
    def truth(b, h, q, k, lens):
        full = mask if mask.ndim == 4 else mask[:, None]
        rows, keys = full.shape[-2:]
        row = 0 if rows == 1 else q - ((lens.k if keys == 1 else keys) - rows)
        column = 0 if keys == 1 else k
        if not (0 <= row < rows and 0 <= column < keys):
            return False
        value = full[b % full.shape[0], h % full.shape[1], row, column]
        return bool(value) if mask.dtype == torch.bool else float(value) > -torch.inf

    return truth


def document_truth(ids):
    def truth(b, h, q, k, lens):
        mine = ids[b].tolist() if ids.ndim == 2 else ids.tolist()
        return 0 <= q < len(mine) and k < len(mine) and mine[q] == mine[k]

    return truth


ROW_FLOATS = FLOATS[torch.arange(2 * 6 * 6).view(2, 6, 6) % 3]
ROW_MASK = torch.tensor([[[True, False, True, True, False, True]]])
COLUMN_MASK = torch.tensor([True, False, True, True, False])[None, None, :, None]

# Masks whose spans are exact, each with its truth in plain Python.
EXACT = [
    (~wm.SlidingWindow(3, None), lambda b, h, q, k, lens: k <= q - 3),
    (~wm.Causal(), lambda b, h, q, k, lens: k > q),
    (wm.Full(), lambda b, h, q, k, n: True),
    (wm.Causal(), lambda b, h, q, k, n: k <= q),
    (wm.Causal(top_left=True), lambda b, h, q, k, n: k <= q - (n.k - n.q)),
    (wm.SlidingWindow(3), lambda b, h, q, k, n: 0 <= q - k < 3),
    (wm.SlidingWindow(1, 2), lambda b, h, q, k, n: q <= k <= q + 2),
    (wm.SlidingWindow(2, None), lambda b, h, q, k, n: q - k < 2),
    (wm.SlidingWindow(None, 1), lambda b, h, q, k, n: k - q <= 1),
    (wm.SlidingWindow(None, None), lambda b, h, q, k, n: True),
    (wm.Chunked(3), lambda b, h, q, k, n: q // 3 == k // 3),
    (wm.Padding(LENGTHS), lambda b, h, q, k, n: k < [3, 7][b]),
    (wm.Prefix(2), lambda b, h, q, k, n: k <= q or k < 2),
    (wm.Prefix(LENGTHS), lambda b, h, q, k, n: k <= q or k < [3, 7][b]),
    (wm.Document(CONTIGUOUS), document_truth(CONTIGUOUS)),
    (wm.Document(CONTIGUOUS[1]), document_truth(CONTIGUOUS[1])),
    (wm.Document(CONTIGUOUS, runs=True), document_truth(CONTIGUOUS)),
]
SOUND = [
    (wm.Document(SCATTERED), document_truth(SCATTERED)),
    (wm.Document(SCATTERED, runs=True), document_truth(run_labels(SCATTERED))),
    (wm.Materialized(EVERY_SECOND), materialized_truth(EVERY_SECOND)),
    (wm.Materialized(EVERY_SECOND[:, 1]), materialized_truth(EVERY_SECOND[:, 1])),
    (wm.Materialized(ROW_MASK), materialized_truth(ROW_MASK)),
    (wm.Materialized(COLUMN_MASK), materialized_truth(COLUMN_MASK)),
    (wm.CustomMask(lambda b, h, q, k: (q + k * b) % 3 != h), lambda b, h, q, k, n: (q + k * b) % 3 != h),
    (
        wm.CustomMask(lambda b, h, q, k, ends, extra: k < ends[b] + extra, ends=LENGTHS, extra=1),
        lambda b, h, q, k, n: k < [3, 7][b] + 1,
    ),
    (wm.CustomMask(lambda b, h, q, k: True), lambda b, h, q, k, n: True),
]
ADDING = [
    (wm.Materialized(ROW_FLOATS), materialized_truth(ROW_FLOATS)),
    (wm.Materialized(ROW_FLOATS[:, :1].half()), materialized_truth(ROW_FLOATS[:, :1])),
]


def kept(mask, sizes, b, h):
    """The mask's traced truth as a bool tensor [Sq, Sk]."""
    program, (rows, keys) = mask.program(), sizes
    q, k = torch.arange(rows)[:, None] + (keys - rows), torch.arange(keys)
    env = {"b": b, "h": h, "q": q, "k": k, "len_q": rows, "len_k": keys}
    return evaluate(program.keep, env, program.tensors).expand(rows, keys)


def check_spans(mask, sizes, b, h, exact=False):
    """Hold the spans of every tile, of any height and place, against `keep`."""
    (rows, keys), program = sizes, mask.program()
    lo, hi = torch.triu_indices(rows, rows)
    count = torch.cat([torch.zeros(1, keys, dtype=torch.int64), kept(mask, sizes, b, h).long().cumsum(0)])
    seen = count[hi + 1] - count[lo]  # [tiles, Sk]
    any_row, all_rows = seen > 0, seen == (hi - lo + 1)[:, None]
    env = {"b": b, "h": h, "q_lo": lo + keys - rows, "q_hi": hi + keys - rows, "len_q": rows, "len_k": keys}
    bounds = [evaluate(node, env, program.tensors).expand(len(lo))[:, None] for node in program.span]
    first, full_lo, full_hi, last = bounds
    assert all(((bound >= 0) & (bound <= keys)).all() for bound in (first, last))
    k = torch.arange(keys)
    outside, full = (k < first) | (k >= last), (k >= full_lo) & (k < full_hi)
    assert not (any_row & outside).any()
    assert all_rows[full].all()
    assert ((first >= last) | (full_lo >= full_hi) | ((first <= full_lo) & (full_hi <= last))).all()
    if exact:
        hull = (any_row.long().cumsum(1) > 0) & (any_row.long().flip(1).cumsum(1).flip(1) > 0)
        assert torch.equal(~outside, hull)
        assert torch.equal(full, all_rows)


@pytest.mark.parametrize(("mask", "truth"), EXACT + SOUND + ADDING, ids=lambda x: type(x).__name__)
def test_keep_is_the_truth_and_spans_bound_it(mask, truth):
    exact = any(mask is other for other, _ in EXACT)
    for sizes in SHAPES:
        lens = wm.Lengths(*sizes)
        for b in range(BATCH):
            for h in range(HEADS):
                drawn = kept(mask, sizes, b, h).tolist()
                for row in range(lens.q):
                    q = row + lens.k - lens.q
                    expected = [truth(b, h, q, k, lens) for k in range(lens.k)]
                    assert drawn[row] == expected
                    assert [bool(mask.keep(b, h, q, k, lens)) for k in range(lens.k)] == expected
                check_spans(mask, sizes, b, h, exact)


# Rows of these see intervals whose ends move with the row, so their intersections have exact spans, too.
INTERVALS = st.one_of(
    st.just(wm.Causal()),
    st.builds(wm.SlidingWindow, st.integers(1, 6) | st.none(), st.integers(0, 4) | st.none()),
    st.builds(wm.Chunked, st.integers(1, 6)),
    st.builds(wm.Prefix, st.integers(0, 6)),
    st.sampled_from([wm.Padding(LENGTHS), wm.Prefix(LENGTHS), wm.Document(CONTIGUOUS)]),
)
LEAVES = st.one_of(INTERVALS, st.sampled_from([mask for mask, _ in EXACT + SOUND]))
COMBINATIONS = st.recursive(
    LEAVES,
    lambda masks: st.one_of(
        st.builds(wm.And, masks, masks), st.builds(wm.Or, masks, masks), st.builds(lambda mask: ~mask, masks)
    ),
    max_leaves=6,
)
SIZES = st.tuples(st.integers(1, 11), st.integers(0, 11))


@settings(max_examples=100)
@given(
    st.lists(INTERVALS, min_size=2, max_size=4),
    st.tuples(st.integers(1, 11), st.integers(0, CONTIGUOUS.shape[1])),
    st.integers(0, BATCH - 1),
)
def test_spans_of_intersections_are_exact(masks, sizes, b):
    mask = masks[0]
    for other in masks[1:]:
        mask = mask & other
    check_spans(mask, sizes, b, 0, exact=True)


def combined(mask, sizes, b, h):
    """The truth of a combination, by way of its parts' truths."""
    if isinstance(mask, wm.And):
        return combined(mask.left, sizes, b, h) & combined(mask.right, sizes, b, h)
    if isinstance(mask, wm.Or):
        return combined(mask.left, sizes, b, h) | combined(mask.right, sizes, b, h)
    return ~combined(mask.mask, sizes, b, h) if isinstance(mask, wm.Not) else kept(mask, sizes, b, h)


@settings(max_examples=200)
@given(COMBINATIONS, SIZES, st.integers(0, BATCH - 1), st.integers(0, HEADS - 1))
def test_spans_of_combinations_are_sound(mask, sizes, b, h):
    assert torch.equal(kept(mask, sizes, b, h), combined(mask, sizes, b, h))
    check_spans(mask, sizes, b, h)


@settings(max_examples=60)
@given(st.lists(st.integers(-3, 3), max_size=12), SIZES, st.booleans())
def test_documents_of_any_order_and_length(ids, sizes, runs):
    ids = torch.tensor(ids, dtype=torch.int64)
    mask = wm.Document(ids, runs)
    check_spans(mask, sizes, 0, 0)
    lens = wm.Lengths(*sizes)
    truth = document_truth(run_labels(ids) if runs else ids)
    expected = [[truth(0, 0, i + lens.k - lens.q, k, lens) for k in range(lens.k)] for i in range(lens.q)]
    assert kept(mask, sizes, 0, 0).tolist() == expected


def span_of(mask, q_lo, q_hi, sizes, b=0):
    env = {"b": b, "h": 0, "q_lo": q_lo, "q_hi": q_hi, "len_q": sizes[0], "len_k": sizes[1]}
    program = mask.program()
    return tuple(int(bound) for bound in evaluate_all(program.span, env, program.tensors))


def test_spans_of_large_tiles():
    sizes = (4096, 4096)
    assert span_of(wm.Causal(), 1024, 1151, sizes) == (0, 0, 1025, 1152)
    assert span_of(wm.SlidingWindow(1024) & wm.Causal(), 2048, 2175, sizes) == (1025, 1152, 2049, 2176)
    assert span_of(wm.Chunked(512) & wm.Causal(), 640, 767, sizes) == (512, 512, 641, 768)
    assert span_of(~wm.Causal(), 1024, 1151, sizes) == (1025, 1152, 4096, 4096)
    assert span_of(wm.Prefix(2000) | wm.Chunked(512), 1024, 1151, sizes) == (0, 0, 2000, 2000)
    first, _, _, last = span_of(wm.Causal() & ~wm.Prefix(4096), 0, 127, sizes)
    assert first >= last


def test_expressions_stay_small():
    q, k = ("sym", "int", "q"), ("sym", "int", "k")
    assert wm.Causal().program().keep == ("le", "bool", k, q)
    assert wm.Full().program().keep == ("const", "bool", True)
    assert wm.Full().program().span[0] == ("const", "int", 0)
    assert (wm.Full() & wm.Causal()).program().keep == ("le", "bool", k, q)
    assert (wm.Full() | wm.Causal()).program().keep == ("const", "bool", True)
    assert (wm.SlidingWindow(8) & wm.Causal()).program().keep == wm.SlidingWindow(8).program().keep
    older = ("sub", "int", q, ("const", "int", 8))
    assert wm.SlidingWindow(8).program().keep == ("and", "bool", ("gt", "bool", k, older), ("le", "bool", k, q))


def test_additive_part():
    bias = torch.zeros(1, 4, 4)
    mask = wm.Materialized(bias)
    assert wm.Causal().additive() is None
    assert wm.Materialized(bias == 0).additive() is None
    added = (wm.Causal() & mask).additive()
    assert added == mask.additive()
    twice = (mask & wm.Materialized(bias + 1)).additive()
    assert twice is not None
    program = twice.program()
    env = {"s": torch.tensor(2.0), "b": 0, "h": 0, "q": torch.tensor([0, 3, 9]), "k": 1, "len_q": 4, "len_k": 4}
    assert evaluate(program.out, env, program.tensors).tolist() == [3, 3, 2]


def test_equality_and_program_cache():
    assert wm.SlidingWindow(8) & wm.Causal() == wm.SlidingWindow(8) & wm.Causal()
    assert wm.SlidingWindow(8) != wm.SlidingWindow(9)
    assert wm.Causal(top_left=True) != wm.Causal()
    assert wm.Prefix(LENGTHS) == wm.Prefix(LENGTHS)
    assert wm.Prefix(LENGTHS) != wm.Prefix(LENGTHS.clone())
    assert wm.Padding(LENGTHS) != wm.Padding(LENGTHS)
    assert len({wm.Causal(), wm.Causal(), wm.Padding(LENGTHS), wm.Document(SCATTERED)}) == 3
    assert (wm.Chunked(8) & wm.Causal()).program() is (wm.Chunked(8) & wm.Causal()).program()
    padded = wm.Padding(LENGTHS) & wm.Causal()
    assert padded.program() is padded.program()
    assert padded.program().tensors[0] is LENGTHS
    assert padded.program().key == (wm.Padding(LENGTHS.clone()) & wm.Causal()).program().key
    assert pickle.loads(pickle.dumps(wm.Causal() & wm.Chunked(8))) == wm.Causal() & wm.Chunked(8)


def test_known_programs_are_not_traced_again(monkeypatch):
    (wm.SlidingWindow(64) & wm.Causal()).program()
    monkeypatch.setattr(wm.Mask, "record", lambda self: pytest.fail(f"{self} is traced again"))
    (wm.SlidingWindow(64) & wm.Causal()).program()
    with pytest.raises(pytest.fail.Exception, match="is traced again"):
        (wm.SlidingWindow(7_654_321) & wm.Causal()).program()  # no other test has it


def test_tensor_masks_are_not_kept_alive():
    before = len(wm.Mask.shared)
    for _ in range(5):
        wm.Padding(LENGTHS.clone()).program()
    assert len(wm.Mask.shared) == before


def test_pictures():
    picture = (wm.Chunked(3) & wm.Causal()).picture(4, 6)
    assert str(picture) == picture.text == "···\n".join(["■■■", "···■··\n···■■·\n···■■■"])
    assert wm.Causal().picture(3, 2).text == "··\n■·\n■■"
    assert wm.Padding(LENGTHS).picture(2, 8, b=1).text == "■■■■■■■·\n■■■■■■■·"
    assert wm.Document(SCATTERED).picture(1, 8).text == "····■·■■"
    svg = wm.Causal().picture(6, 6, tile=3).svg
    assert svg.startswith("<svg ")
    assert svg.rstrip().endswith("</svg>")
    assert svg.count("#3d6fb4") == 21
    assert svg.count("stroke=") == svg.count("fill-opacity") == 2
    assert wm.Causal().picture(0, 4).text == ""
    with pytest.raises(AttentionError, match="Sq is -1"):
        wm.Causal().picture(-1, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: wm.Causal(top_left=1), "top_left is 1"),
        (lambda: wm.SlidingWindow(0), "window is 0"),
        (lambda: wm.SlidingWindow(True), "window is True"),
        (lambda: wm.SlidingWindow(2.5), "window is 2.5"),
        (lambda: wm.SlidingWindow(2**40), "window is 1099511627776"),
        (lambda: wm.SlidingWindow(2, -1), "right is -1"),
        (lambda: wm.Chunked(0), "size is 0"),
        (lambda: wm.Chunked("3"), "size is '3'"),
        (lambda: wm.Padding([1, 2]), r"valid_lengths is \[1, 2\]"),
        (lambda: wm.Padding(LENGTHS.float()), "valid_lengths is a torch.float32 tensor"),
        (lambda: wm.Padding(LENGTHS[None]), r"shape \(1, 2\)"),
        (lambda: wm.Prefix(-1), "length is -1"),
        (lambda: wm.Prefix(LENGTHS.bool()), "length is a torch.bool tensor"),
        (lambda: wm.Document(SCATTERED.float()), "ids is a torch.float32 tensor"),
        (lambda: wm.Document(EVERY_SECOND.int()), "ids is a torch.int32 tensor of shape"),
        (lambda: wm.Materialized(ROW_MASK[0]), r"shape \(1, 6\)"),
        (lambda: wm.Materialized(ROW_MASK.int()), "mask is a torch.int32 tensor"),
        (lambda: wm.Materialized(None), "mask is None"),
        (lambda: wm.CustomMask(3), "CustomMask got 3"),
        (lambda: wm.CustomMask(print, x="a"), "CustomMask captures x='a'"),
        (lambda: wm.Causal() & 3, "& got 3"),
        (lambda: wm.Causal() | None, "| got None"),
        (lambda: wm.Causal() | wm.Materialized(ROW_FLOATS), "additive masks combine by & only"),
        (lambda: ~(wm.Causal() & wm.Materialized(ROW_FLOATS)), "additive masks combine by & only"),
        (lambda: wm.Mask().program(), "mask is a Mask without keep; a mask must define keep"),
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(AttentionError, match=message):
        make()


@pytest.mark.parametrize("value", [wm.Causal(), wm.Causal() & wm.Chunked(3), SoftCap(3.0), SoftCap(3.0) | ALiBi(2)])
def test_a_value_has_no_truth_value(value):
    """`a and b` would be b alone, `a or b` a alone: both are calls with another mask than the one that was meant."""
    for combine in (lambda: value and value, lambda: value or value, lambda: not value, lambda: 1 if value else 2):
        with pytest.raises(AttentionError, match=r"has no truth value .*; combine masks with & \| ~"):
            combine()


@pytest.mark.parametrize("left", [wm.Causal(), wm.Materialized(ROW_FLOATS)])
@pytest.mark.parametrize("right", [wm.Chunked(3), wm.Materialized(ROW_FLOATS)])
def test_what_a_combination_adds(left, right):
    adding = [mask.additive() for mask in (left, right) if mask.additive() is not None]
    added = (left & right).additive()
    assert (added is None) == (not adding) and len(getattr(added, "scores", [added])) == max(1, len(adding))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda b, h, q, k: None, "returned None"),
        (lambda b, h, q, k: q - k, "returned a symbol of dtype int"),
        (lambda b, h, q, k: LENGTHS > 1, "returned a Tensor"),
        (lambda b, h, q, k: 1, "returned an int"),
        (lambda b, h, q, k: k <= q and q < 3, "use & | ~ and where()"),
        (lambda b, h, q, k: LENGTHS[b] > k, "capture tensors as keyword arguments"),
        (lambda b, q, k: k <= q, "takes 3 positional arguments"),
    ],
)
def test_bad_mask_functions(fn, message):
    with pytest.raises(AttentionError) as caught:
        wm.CustomMask(fn).program()
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{Path(__file__)}:{fn.__code__.co_firstlineno}: ")


def test_functions_without_source_and_objects():
    names = {}
    exec("def fn(b, h, q, k): return (k <= q) | (k < 2)", names)
    assert kept(wm.CustomMask(names["fn"]), (4, 6), 0, 0).equal(kept(wm.Prefix(2), (4, 6), 0, 0))

    class Near:
        def __call__(self, b, h, q, k, width):
            return where(abs(q - k) < minimum(width, 4), exp(to_float(k)) > 0.0, False)

    mask = wm.CustomMask(Near(), width=2)
    assert isinstance(mask.keep(0, 0, symbol("q"), 3), Expr)
    assert kept(mask, (5, 5), 0, 0).equal(kept(wm.SlidingWindow(2, 1), (5, 5), 0, 0))


@pytest.mark.parametrize("first", [0, 3])
def test_keys_are_visited_in_order_unless_none_is_hidden_first(first: int) -> None:
    """Without a full part all tiles are visited in one order; where keys from 0 on are seen that is so already."""
    lens = wm.Lengths(8, 8)

    class From(wm.Mask):
        def keep(self, b, h, q, k, lens=None):
            return k >= first

        def kv_span(self, b, h, q_lo, q_hi, lens):
            return wm.Span(first, first, lens.k, lens.k)

    span = InOrder(From()).kv_span(0, 0, 0, 8, lens)
    assert (span.first, span.full_lo, span.full_hi, span.last) == ((0, 0, 8, 8) if first == 0 else (3, 8, 0, 8))
