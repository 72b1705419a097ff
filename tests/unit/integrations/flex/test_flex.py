"""FlexAttention's functions, block masks and interface: its results, and errors that name what has no translation."""

import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import relu

import warpattn as wa
from warpattn.integrations.flex import MaskMod, ScoreMod, flex_attention, mask_of, score_of
from warpattn.integrations.flex.blocks import BlockSparse
from warpattn.language.evaluate import evaluate
from warpattn.language.traced import Lengths
from warpattn.masks.base import Span

B, H, HKV, D, DV = 2, 4, 2, 16, 8
DOCUMENT = torch.tensor([[0] * 10 + [1] * 30, [0] * 25 + [1] * 15])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.randn(H, 80, generator=torch.Generator().manual_seed(0))
CAP = torch.tensor(2.0)
COUNT = torch.tensor([30, 40])
HALF = torch.tensor(True)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def documents(b, h, q_idx, kv_idx):
    return DOCUMENT[b, q_idx] == DOCUMENT[b][kv_idx]


MASKS = {
    "causal": causal,
    "window": lambda b, h, q, k: (q - k).abs() <= 5,
    "two-sided": lambda b, h, q, k: torch.logical_and(q - k < 9, torch.le(k - q, 3)),
    "documents": flex.and_masks(causal, documents),
    "prefix": flex.or_masks(causal, lambda b, h, q, k: k < COUNT[b] // 3),
    "nothing masked": flex.noop_mask,
    "heads differ": lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, q <= k),
    "dilated": lambda b, h, q, k: ((q - k) % 3 == 0) | ~(k > 2),
    "not": lambda b, h, q, k: torch.logical_not(torch.eq(q, k)) ^ (h == 1),
    "blocks": lambda b, h, q, k: torch.div(q, 8, rounding_mode="floor") == k // 8,
    "bits": lambda b, h, q, k: ((q << 1) & 6) != (k & 6),
    "sums and products of bools": lambda b, h, q, k: (q >= k) * (h == k % 2) + torch.minimum(q == k, k > 3) + (q < 2),
    "made": lambda b, h, q, k: (
        torch.logical_or(torch.zeros_like(q, dtype=torch.bool), q >= k) & ~torch.zeros_like(q, dtype=torch.bool)
    ),
    "constant": lambda b, h, q, k: torch.tensor(True) & HALF,
    "numbers made": lambda b, h, q, k: k < torch.tensor(7) + torch.tensor(6),
}
SCORES = {
    "identity": lambda s, b, h, q, k: s,
    "alibi": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "alibi by formula": lambda s, b, h, q, k: s - torch.exp2(-((h + 1) * 8.0 / H)) * (q - k).abs(),
    "power of two": lambda s, b, h, q, k: s + 2.0 ** -(h + 1) + 2**h,
    "table from the end": lambda s, b, h, q, k: s + TABLE[h, q - k],
    "last of a table": lambda s, b, h, q, k: s * TABLE[h, -1] - TABLE[-2][k],
    "cap": lambda s, b, h, q, k: CAP * torch.tanh(s / CAP),
    "cap by method": lambda s, b, h, q, k: 20 * (s / 20).tanh(),
    "mask inside": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "filled": lambda s, b, h, q, k: s.masked_fill(k > q + 3, torch.finfo(s.dtype).min),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(s) * s.float() + torch.rsqrt(k.to(torch.float32) + 1),
    "clamp": lambda s, b, h, q, k: s.clamp(min=-0.5).clamp(max=0.7) + torch.clamp(q - k, -2, 2) + relu(s),
    "minimum": lambda s, b, h, q, k: torch.minimum(s, torch.maximum(q, k) * 0.1),
    "rounding": lambda s, b, h, q, k: torch.floor(s * 3) + torch.ceil(s) + torch.trunc(s * 2) + s // 0.5 + s % 0.75,
    "powers": lambda s, b, h, q, k: (
        s**3 + torch.pow(s, 2) + torch.square(s) + (s.abs() + 1) ** -1 + torch.sqrt(k + 1.0)
    ),
    "logarithms": lambda s, b, h, q, k: torch.log(s.exp()) + torch.log2(k + 1.0) + torch.log1p(k * 1.0) + s.expm1(),
    "signs": lambda s, b, h, q, k: torch.sign(s) * -s + s.neg() + torch.reciprocal(s.abs() + 2) + (+s),
    "reversed": lambda s, b, h, q, k: 1 - s + 3 / (s.abs() + 1) + 7 // (k + 1) + 7 % (h + 2) + torch.rsub(s, 2),
    "casts": lambda s, b, h, q, k: (
        s + (s * 5).to(torch.int32) + (q > k).float() + (k.long() - q.int()).type(torch.float)
    ),
    "alpha": lambda s, b, h, q, k: torch.add(s, k, alpha=0.1) - torch.sub(s, q, alpha=0.5) + s.mul(h).div(3),
    "made": lambda s, b, h, q, k: (
        s + torch.full_like(s, 0.5) * torch.ones_like(s) + s.new_zeros(()) + torch.tensor(2.0)
    ),
    "sums of bools": lambda s, b, h, q, k: (
        s + ((q > k) + (k > h)) * 0.5 + torch.maximum(q > k, k > h) + torch.add(q > k, k > h) * (k > 2) * (k < 9)
    ),
    "zeros": lambda s, b, h, q, k: (
        torch.max(s, torch.zeros_like(s)) + torch.minimum(torch.full_like(s, 0.3), s) ** torch.full_like(s, 2)
    ),
    "where": lambda s, b, h, q, k: (
        s.where(q > k, -s) + torch.where(condition=q > 3, input=s, other=k * 0.1) + torch.where(q > k, s, other=s * 2)
    ),
    "keywords": lambda s, b, h, q, k: torch.clamp(input=s, min=-0.5, max=0.5) + torch.add(s, other=k, alpha=0.1),
    "decay": lambda s, b, h, q, k: s * 0.9 ** (q - k).abs() + s ** (h % 3) + (k - q) ** 2.0 + s.abs() ** (h * 0.5),
    "questions": lambda s, b, h, q, k: (
        s.squeeze() * s.numel() + s.dim() + torch.is_floating_point(s) - q.is_floating_point() + q.detach()
    ),
    "tests": lambda s, b, h, q, k: torch.where(torch.isnan(s) | torch.isinf(s / 0.0), s, -s),
}


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """FlexAttention itself, uncompiled and without a warning about it."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def qkv(rows=40, keys=40, kv_heads=H):
    return torch.randn(B, H, rows, D), torch.randn(B, kv_heads, keys, D), torch.randn(B, kv_heads, keys, DV)


def theirs(q, k, v, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flex.flex_attention(q, k, v, **options)


@pytest.mark.parametrize("sizes", [(40, 40), (21, 40), (40, 33)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, sizes):
    q, k, v = qkv(*sizes)
    mask = flex.create_block_mask(MASKS[name], B, H, *sizes, device="cpu", BLOCK_SIZE=16)
    expected = theirs(q, k, v, block_mask=mask).nan_to_num(0.0)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=MASKS[name]), expected)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    q, k, v = qkv(21, 40)
    expected = theirs(q, k, v, score_mod=SCORES[name])
    torch.testing.assert_close(flex_attention(q, k, v, score_mod=SCORES[name]), expected, rtol=2e-5, atol=2e-5)


def test_converted_once_for_the_functions_of_this_package():
    q, k, v = qkv()
    mask, score = mask_of(causal), score_of(SCORES["alibi"])
    assert isinstance(mask, MaskMod)
    assert isinstance(score, ScoreMod)
    assert mask_of(mask) is mask
    assert score_of(score) is score
    assert mask.program() is mask.program()
    out = wa.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=mask, score=score | wa.SoftCap(5.0))
    expected = theirs(q, k, v, score_mod=lambda s, b, h, i, j: 5.0 * torch.tanh(SCORES["alibi"](s, b, h, i, j) / 5.0),
                      block_mask=flex.create_block_mask(causal, None, None, 40, 40, device="cpu"))  # fmt: skip
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_functions_are_translated_again_in_every_call():
    q, k, v = qkv(8, 8)
    shift = 1.0

    def bias(s, b, h, q_idx, kv_idx):
        return s * shift

    first = flex_attention(q, k, v, score_mod=bias)
    shift = 3.0
    torch.testing.assert_close(flex_attention(q, k, v, score_mod=bias), theirs(q, k, v, score_mod=bias))
    assert not torch.allclose(first, flex_attention(q, k, v, score_mod=bias))


def test_gradients_reach_inputs_and_captured_tensors():
    tensors = [x.requires_grad_() for x in qkv(8, 8)]
    table, gain = torch.randn(H, 8, requires_grad=True), torch.tensor(0.7, requires_grad=True)

    def bias(s, b, h, q_idx, kv_idx):
        return s * gain + table[h, kv_idx]

    out = flex_attention(*tensors, score_mod=bias, block_mask=causal)
    weight = torch.randn_like(out)
    gradients = torch.autograd.grad(out, [*tensors, table, gain], weight)
    q, k, v = tensors
    s = (q @ k.mT) * D**-0.5 * gain + table[:, None]
    plain = torch.softmax(s.masked_fill(~torch.ones(8, 8).tril().bool(), -torch.inf), -1) @ v
    for mine, expected in zip(gradients, torch.autograd.grad(plain, [*tensors, table, gain], weight), strict=True):
        torch.testing.assert_close(mine, expected)


def test_options_of_the_interface():
    q, k, v = qkv(kv_heads=HKV)
    mask = flex.create_block_mask(causal, None, None, 40, 40, device="cpu")
    out, lse = flex_attention(q, k, v, None, mask, 0.4, True, True)
    expected, aux = theirs(q, k, v, block_mask=mask, scale=0.4, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, aux.lse)
    again, mine = flex_attention(q, k, v, block_mask=mask, scale=0.4, enable_gqa=True,
                                 return_aux=flex.AuxRequest(lse=True))  # fmt: skip
    assert torch.equal(again, out)
    assert torch.equal(mine.lse, lse)
    assert mine.max_scores is None
    assert flex_attention(q, k, v, enable_gqa=True, return_aux=flex.AuxRequest())[1].lse is None
    shared = flex_attention(q, k[:1], v[:1], enable_gqa=True)
    torch.testing.assert_close(shared, flex_attention(q, k[:1].expand(B, -1, -1, -1), v[:1].expand(B, -1, -1, -1),
                                                      enable_gqa=True))  # fmt: skip
    everything = flex_attention(q, k, v, block_mask=wa.Causal(), score_mod=wa.SoftCap(3.0), enable_gqa=True)
    torch.testing.assert_close(everything, flex_attention(
        q, k, v, block_mask=mask, score_mod=lambda s, b, h, i, j: 3.0 * torch.tanh(s / 3.0), enable_gqa=True
    ))  # fmt: skip


def grid(mask, rows, keys):
    """What a mask shows and what its spans promise, for every row tile of 1, 3 and 16 rows."""
    program, lens = mask.program(), {"len_q": rows, "len_k": keys}
    shift = keys - rows
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    q, k = torch.arange(rows)[:, None] + shift, torch.arange(keys)
    seen = evaluate(program.keep, {"b": b, "h": h, "q": q, "k": k, **lens}, program.tensors).expand(B, H, rows, keys)
    for height in (1, 3, 16):
        for start in range(0, rows, height):
            stop = min(start + height, rows)
            env = {"b": b, "h": h, "q_lo": start + shift, "q_hi": start + height - 1 + shift, **lens}
            span = Span(*(evaluate(node, env, program.tensors) for node in program.span))
            tile = seen[:, :, start:stop]
            assert not (tile & ((k < span.first) | (k >= span.last))).any()
            assert (tile | ~((k >= span.full_lo) & (k < span.full_hi))).all()
    return seen


@pytest.mark.parametrize("sizes", [(40, 40), (21, 40), (40, 33), (50, 7)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_spans_hold_what_blocks_promise(name, sizes):
    rows, keys = sizes
    function = MASKS[name] if name != "documents" else causal  # documents are as long as 40 positions
    mask = mask_of(flex.create_block_mask(function, B, H, rows, keys, device="cpu", BLOCK_SIZE=(16, 8)))
    assert isinstance(mask, BlockSparse)
    expected = flex.create_mask(function, B, H, rows, keys, device="cpu")
    assert torch.equal(grid(mask, rows, keys), expected)


def test_spans_of_a_causal_block_mask_are_tight():
    mask = mask_of(flex.create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16))
    env = {"b": 0, "h": 0, "q_lo": 32, "q_hi": 47, "len_q": 64, "len_k": 64}
    program = mask.program()
    assert [int(evaluate(node, env, program.tensors)) for node in program.span] == [0, 0, 32, 48]


def test_blocks_decide_as_in_flex_attentions_kernels():
    """Full blocks are visible whatever mask_mod says, blocks that are not listed are hidden."""
    counts, indices = torch.tensor([[[1, 1]]]), torch.tensor([[[[0, 1], [1, 0]]]])
    full, full_indices = torch.tensor([[[0, 1]]]), torch.tensor([[[[0, 1], [0, 1]]]])
    for with_full in (True, False):
        blocks = flex.BlockMask.from_kv_blocks(
            counts, indices, *((full, full_indices) if with_full else ()), BLOCK_SIZE=4,
            mask_mod=lambda b, h, q, k: k % 2 == 0,
        )  # fmt: skip
        even = (torch.arange(8) % 2 == 0).expand(4, 8)
        upper = even & (torch.arange(8) < 4)
        lower = (even & (torch.arange(8) >= 4)) | ((torch.arange(8) < 4) & with_full)
        expected = torch.cat([upper, lower]).expand(B, H, 8, 8)
        assert torch.equal(grid(mask_of(blocks), 8, 8), expected)
        q, k, v = qkv(8, 8)
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, expected)
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks), dense)


@pytest.mark.parametrize("seed", range(20))
def test_any_blocks(seed):
    random = torch.Generator().manual_seed(seed)
    rows, keys, height, width = (int(x) for x in torch.randint(1, 12, (4,), generator=random))
    state = torch.randint(0, 3, (B, 1, -(-rows // height), -(-keys // width)), generator=random)
    state[torch.rand(state.shape, generator=random) < seed / 20] = 2  # from sparse to nearly full
    lists = []
    for kind in (1, 2):
        indices = torch.argsort((state == kind).int(), dim=-1, descending=True, stable=True)
        lists += [(state == kind).sum(-1), indices]
    blocks = flex.BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=(height, width), mask_mod=lambda b, h, q, k: (q + k + h) % 3 != 0, seq_lengths=(rows, keys)
    )
    h, q, k = torch.arange(H)[:, None, None], torch.arange(rows)[:, None], torch.arange(keys)
    of = state[:, :, torch.arange(rows) // height][..., torch.arange(keys) // width]
    assert torch.equal(grid(mask_of(blocks), rows, keys), (of == 2) | ((of == 1) & ((q + k + h) % 3 != 0)))


@pytest.mark.parametrize("widths", [(4, 1), (1, 4), (4, 2), (0, 1), (6, 3)], ids=str)
def test_lists_of_blocks_have_any_widths(widths):
    """Row block i sees block 0 in full, and a part of block 3 if the list of partial blocks has room for it."""
    partial, full = (torch.zeros(1, 1, 4, width, dtype=torch.int32) for width in widths)
    count = torch.full((1, 1, 4), min(widths[0], 1), dtype=torch.int32)
    partial[..., :1] = 3
    one = torch.ones(1, 1, 4, dtype=torch.int32)
    blocks = flex.BlockMask.from_kv_blocks(count, partial, one, full, BLOCK_SIZE=8, seq_lengths=(32, 30),
                                           mask_mod=lambda b, h, q, k: k >= q, compute_q_blocks=False)  # fmt: skip
    q, k = torch.arange(32)[:, None], torch.arange(30)
    expected = (k < 8) | ((k >= 24) & (k >= q) & (widths[0] > 0))
    assert torch.equal(grid(mask_of(blocks), 32, 30), expected.expand(B, H, 32, 30))


def test_masks_with_tensors_instead_of_symbols():
    """What Mask.keep gives for tensors of indices, as pictures and tests use it."""
    lens = Lengths(5, 7)
    q, k = torch.arange(5)[:, None] + 2, torch.arange(7)
    assert torch.equal(mask_of(causal).keep(0, 0, q, k, lens), torch.ones(5, 7).tril().bool())
    assert mask_of(causal).picture(2, 3).text == "■··\n■■·"
    score = score_of(SCORES["alibi"]).apply(torch.zeros(5, 7), 0, 1, q, k, lens)
    torch.testing.assert_close(score, 0.25 * (k - (q - 2)))


def test_in_compiled_functions():
    q, k, v = qkv(8, 8)
    compiled = torch.compile(flex_attention, backend="eager")
    with torch.no_grad():
        for table in (torch.randn(8), torch.randn(8)):
            options = {"score_mod": lambda s, b, h, i, j, t=table: s + t[j], "block_mask": causal}
            assert torch.equal(compiled(q, k, v, **options), flex_attention(q, k, v, **options))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        graph = torch.compile(lambda mask: wa.attention(q, k, v, mask=mask), backend="eager", fullgraph=True)
        for function in (causal, lambda b, h, i, j: i <= j):
            mask = mask_of(flex.create_block_mask(function, None, None, 8, 8, device="cpu", BLOCK_SIZE=4))
            assert torch.equal(graph(mask), wa.attention(q, k, v, mask=mask))


UNTRANSLATED = {
    "lgamma": (lambda s, b, h, q, k: torch.lgamma(s), "torch's lgamma has no translation"),
    "method": (lambda s, b, h, q, k: s.digamma(), "digamma of a number has no translation"),
    "if": (lambda s, b, h, q, k: s if q > k else -s, "a symbol has no truth value"),
    "math": (lambda s, b, h, q, k: __import__("math").exp(s), "a symbol is not a number yet"),
    "range": (lambda s, b, h, q, k: sum(range(k)) + s, "a symbol is not a number yet"),
    "list": (lambda s, b, h, q, k: s + [1.0, 2.0][h], "a symbol is not a number yet"),
    "whole tensor": (lambda s, b, h, q, k: s + TABLE, r"torch's add of a tensor of shape \(4, 80\) has no"),
    "row": (lambda s, b, h, q, k: s + TABLE[h], r"a tensor of shape \(4, 80\) read with 1 indices has no"),
    "too many": (lambda s, b, h, q, k: s + SLOPES[h, k], r"a tensor of shape \(4,\) read with 2 indices has no"),
    "float index": (lambda s, b, h, q, k: s + SLOPES[h * 0.5], r"a tensor of shape \(4,\) read at a float"),
    "slice": (lambda s, b, h, q, k: s + TABLE[h, :], r"read at slice\(None, None, None\) instead of an int"),
    "symbol indexed": (lambda s, b, h, q, k: s[0], "an index of a number has no translation"),
    "power": (lambda s, b, h, q, k: s**9, "the power 9 has no translation"),
    "exponent": (lambda s, b, h, q, k: s + 3**k, "a power of ints with an exponent"),
    "new tensor": (lambda s, b, h, q, k: s + s.new_ones(3), r"a new tensor of shape \(3,\) has no translation"),
    "detach": (lambda s, b, h, q, k: s - s.detach(), "detach of a number that gradients may reach"),
    "many": (lambda s, b, h, q, k: torch.isin(k, TABLE) * s, "isin of .* over 64 elements"),
    "sum": (lambda s, b, h, q, k: s.sum(), "sum of a number has no translation"),
    "stack": (lambda s, b, h, q, k: torch.stack([s, s]), "torch's stack has no translation"),
    "arity": (lambda s, b, h: s, "TypeError"),
    "attribute": (lambda s, b, h, q, k: k.nothing, "nothing of a number has no translation"),
    "bool": (lambda s, b, h, q, k: q > k, "a score_mod must return a number"),
    "nothing returned": (lambda s, b, h, q, k: None, "a score_mod must return a number"),
}


@pytest.mark.parametrize(("function", "message"), UNTRANSLATED.values(), ids=UNTRANSLATED)
def test_what_has_no_translation_is_named_with_its_line(function, message):
    with pytest.raises(wa.AttentionError, match=message) as caught:
        flex_attention(*qkv(4, 4), score_mod=function)
    assert f"{function.__code__.co_filename}:" in str(caught.value)


@pytest.mark.parametrize("number", [0, 2.5, -3])
def test_a_score_mod_may_return_a_number(number):
    q, k, v = qkv(4, 7)
    out = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: number)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))


def test_masks_must_return_a_bool():
    for function in (lambda b, h, q, k: q - k, lambda b, h, q, k: 1, lambda b, h, q, k: None):
        with pytest.raises(wa.AttentionError, match="a mask_mod must return a bool"):
            flex_attention(*qkv(4, 4), block_mask=function)


BLOCKS = flex.create_block_mask(causal, None, None, 40, 40, device="cpu")


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        (qkv(), {"kernel_options": 64}, r"^kernel_options is 64; it must be None or a dictionary"),
        (qkv(), {"return_aux": {"lse": True}}, "^return_aux is {'lse': True}; it must be None or an AuxRequest"),
        (qkv(), {"return_aux": flex.AuxRequest(lse=True), "return_lse": True}, r"^return_lse is True and return_aux"),
        (qkv(kv_heads=HKV), {}, r"^query has 4 heads and key 2; that needs enable_gqa=True"),
        (qkv(20, 40), {"block_mask": BLOCKS}, r"^block_mask has shape \(1, 1, 40, 40\)"),
        (qkv(), {"block_mask": flex.create_block_mask(causal, 3, None, 40, 40, device="cpu")}, "^block_mask has shape"),
        (qkv(), {"block_mask": BLOCKS[:, :, 0]}, "sliced BlockMask"),
        (qkv(), {"block_mask": 3}, "^block_mask is an int"),
        (qkv(), {"score_mod": "alibi"}, "^score_mod is a str"),
        ((torch.randn(4, 16),) * 3, {}, r"- query is a tensor of shape \(4, 16\)"),
        (("q", "k", "v"), {}, "- query is a str"),
    ],
)
def test_what_is_refused_is_named(tensors, options, message):
    with pytest.raises(wa.AttentionError, match=message):
        flex_attention(*tensors, **options)


def test_every_broken_rule_is_listed():
    options = {"kernel_options": 64, "return_aux": flex.AuxRequest(lse=True), "return_lse": True}
    with pytest.raises(wa.AttentionError) as error:
        flex_attention(*qkv(20, 40, kv_heads=HKV), block_mask=BLOCKS, **options)
    named = ("query has", "block_mask", "kernel_options", "return_lse")
    assert [reason.startswith(name) for reason, name in zip(error.value.reasons, named, strict=True)] == [True] * 4
    with pytest.raises(wa.AttentionError) as error:
        flex_attention(torch.randn(4, 16), "k", qkv()[2], return_aux=True)
    assert [reason.split()[0] for reason in error.value.reasons] == ["query", "key", "return_aux"]


def test_functions_get_tensors_for_numbers():
    """As FlexAttention calls them: functions of torch take no Python numbers. Rows count from the last key's end."""
    mask = MaskMod(lambda b, h, q, k: torch.logical_and(torch.eq(b, 0), q >= k))
    rows, keys = torch.arange(2, 5)[:, None], torch.arange(5)[None]
    assert torch.equal(mask.keep(0, 1, rows, keys, Lengths(3, 5)), rows - 2 >= keys)
    assert torch.equal(mask.keep(0, 1, keys.T, keys), keys <= keys.T)
    assert not mask.keep(1, 1, rows, keys, Lengths(3, 5)).any()
