"""flash-attn 2 by its own names: every documented parameter works or is refused by name."""

import inspect

import pytest
import torch

import warpattn as wa
from tests.unit.integrations.flash_attn import flash_attn_truth as truth
from warpattn.integrations import flash_attn
from warpattn.integrations.flash_attn import packed, version2, version3, version4

B, SQ, SK, H, HKV, D = 2, 7, 11, 4, 2, 16
CU_Q = torch.tensor([0, 3, 7, 7], dtype=torch.int32)
CU_K = torch.tensor([0, 5, 9, 11], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.fixture(autouse=True)
def _installed():
    with flash_attn.installed(2):
        yield


def dense():
    return torch.randn(B, SQ, H, D), torch.randn(B, SK, HKV, D), torch.randn(B, SK, HKV, D)


def rows(total_q=7, total_k=11):
    return torch.randn(total_q, H, D), torch.randn(total_k, HKV, D), torch.randn(total_k, HKV, D)


OPTIONS = {
    "nothing": ({}, {}),
    "causal": ({"causal": True}, {"keep": truth.causal}),
    "window": ({"window_size": (2, 1)}, {"keep": truth.window(2, 1)}),
    "left window": ({"window_size": (3, -1)}, {"keep": truth.window(3, 100)}),
    "right window": ({"window_size": (-1, 2)}, {"keep": truth.window(100, 2)}),
    "causal window": ({"causal": True, "window_size": (2, 5)}, {"keep": truth.window(2, 0)}),
    "soft cap": ({"softcap": 0.5}, {"softcap": 0.5}),
    "alibi": ({"alibi_slopes": SLOPES}, {"slopes": SLOPES}),
    "alibi and cap": (
        {"alibi_slopes": SLOPES, "softcap": 0.7, "causal": True},
        {"slopes": SLOPES, "softcap": 0.7, "keep": truth.causal},
    ),
    "scale": ({"softmax_scale": 0.9}, {"scale": 0.9}),
    "hints": ({"deterministic": True}, {}),
}


@pytest.mark.parametrize(("given", "meaning"), OPTIONS.values(), ids=OPTIONS)
def test_options_of_dense_attention(given, meaning):
    from flash_attn import flash_attn_func

    q, k, v = dense()
    out, lse, probs = flash_attn_func(q, k, v, **given, return_attn_probs=True)
    expected, expected_lse = truth.batch(q, k, v, **meaning)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert probs.numel() == 0
    assert torch.equal(flash_attn_func(q, k, v, **given), out)


@pytest.mark.parametrize(("given", "meaning"), OPTIONS.values(), ids=OPTIONS)
def test_options_of_ragged_attention(given, meaning):
    from flash_attn import flash_attn_varlen_func

    q, k, v = rows()
    out, lse, _ = flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 4, 5, **given, return_attn_probs=True)
    expected, expected_lse = truth.ragged(q, k, v, CU_Q, CU_K, **meaning)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_rows_that_see_nothing_are_zero():
    from flash_attn import flash_attn_func

    q, k, v = torch.randn(1, 5, 1, D), torch.randn(1, 2, 1, D), torch.randn(1, 2, 1, D)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out[:, :3], torch.zeros(1, 3, 1, D))
    assert torch.equal(lse[..., :3], torch.full((1, 1, 3), -torch.inf))
    torch.testing.assert_close(out[:, 3], v[:, 0])


def test_positions_of_arguments_are_those_of_flash_attn():
    from flash_attn import flash_attn_func

    q, k, v = dense()
    out, lse, _ = flash_attn_func(q, k, v, 0.0, 0.5, True, (3, -1), 0.9, SLOPES, False, True)
    options = {"keep": truth.window(3, 0), "softcap": 0.9, "slopes": SLOPES, "scale": 0.5}
    torch.testing.assert_close(out, truth.batch(q, k, v, **options)[0])
    torch.testing.assert_close(lse, truth.batch(q, k, v, **options)[1])


def test_packed_tensors():
    from flash_attn import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )

    qkv = torch.randn(B, SQ, 3, H, D)
    expected = flash_attn_func(*qkv.unbind(2), causal=True)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True), expected)
    q, kv = torch.randn(B, SQ, H, D), torch.randn(B, SK, 2, HKV, D)
    assert torch.equal(flash_attn_kvpacked_func(q, kv, 0.0, 0.3), flash_attn_func(q, *kv.unbind(2), 0.0, 0.3))
    qkv, kv = torch.randn(7, 3, H, D), torch.randn(11, 2, HKV, D)
    starts = CU_Q, CU_Q, 4, 4
    expected = flash_attn_varlen_func(*qkv.unbind(1), *starts, causal=True)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, CU_Q, 4, causal=True), expected)
    expected = flash_attn_varlen_func(q[0], *kv.unbind(1), CU_Q, CU_K, 4, 5, window_size=(2, 0))
    out = flash_attn_varlen_kvpacked_func(q[0], kv, CU_Q, CU_K, 4, 5, window_size=(2, 0))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("lengths", [(3, 4, 0), (2, 2, 2)], ids=["ragged", "even"])
def test_ragged_queries_over_pages(lengths, trained, monkeypatch):
    """Pages are read in place, and gathered where gradients are wanted."""
    from flash_attn import flash_attn_varlen_func

    gathered, gather = [], packed._gathered
    monkeypatch.setattr(packed, "_gathered", lambda keys: gathered.append(keys) or gather(keys))
    cu_q = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    q = torch.randn(sum(lengths), H, D)
    pages_k, pages_v = (torch.randn(6, 4, HKV, D, requires_grad=trained) for _ in range(2))
    table = torch.tensor([[5, 2], [0, 3], [1, 4]], dtype=torch.int32)
    out, lse, _ = flash_attn_varlen_func(
        q, pages_k, pages_v, cu_q, CU_K, max(lengths), 5, causal=True, block_table=table, return_attn_probs=True
    )
    k, v = (torch.cat([x[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate((5, 4, 2))])
            for x in (pages_k, pages_v))  # fmt: skip
    expected, expected_lse = truth.ragged(q, k, v, cu_q, CU_K, keep=truth.causal)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert bool(gathered) == trained
    if trained:
        found, wanted = (torch.autograd.grad(x.square().sum(), (pages_k, pages_v)) for x in (out, expected))
        torch.testing.assert_close(found, wanted)


def test_gradients_are_those_of_the_truth():
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    for call, plain, tensors in (
        (lambda *x: flash_attn_func(*x, causal=True), lambda *x: truth.batch(*x, keep=truth.causal)[0], dense()),
        (
            lambda *x: flash_attn_varlen_func(*x, CU_Q, CU_K, 4, 5),
            lambda *x: truth.ragged(*x, CU_Q, CU_K)[0],
            rows(),
        ),
    ):
        for x in tensors:
            x.requires_grad_()
        out, expected = call(*tensors), plain(*tensors)
        weight = torch.randn_like(out)
        for a, b in zip(torch.autograd.grad(out, tensors, weight), torch.autograd.grad(expected, tensors, weight),
                        strict=True):  # fmt: skip
            torch.testing.assert_close(a, b)


def test_padding_and_back():
    from flash_attn import flash_attn_varlen_qkvpacked_func
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input

    real = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0]])
    hidden = torch.randn(2, 4, 3 * H * D)
    kept, indices, cu_seqlens, longest, lengths = unpad_input(hidden, real)
    assert (cu_seqlens.tolist(), longest, lengths.tolist()) == ([0, 3, 5], 3, [3, 2])
    assert torch.equal(kept, index_first_axis(hidden.flatten(0, 1), indices))
    out = flash_attn_varlen_qkvpacked_func(kept.view(-1, 3, H, D), cu_seqlens, longest, causal=True)
    back = pad_input(out, indices, 2, 4)
    assert torch.equal(back[real == 0], torch.zeros(3, H, D))
    q, k, v = hidden[1, 1:3].view(2, 3, H, D).unbind(1)
    torch.testing.assert_close(back[1, 1:3], truth.attend(q, k, v, truth.causal)[0])
    _, _, cu_seqlens, _, lengths = unpad_input(hidden, real, unused_mask=1 - real)
    assert (cu_seqlens.tolist(), lengths.tolist()) == ([0, 4, 8], [3, 2])
    assert unpad_input(hidden[:0], real[:0])[3] == 0


def test_padding_of_rows_with_several_sequences():
    from flash_attn.bert_padding import index_first_axis_residual, pad_input, unpad_input_for_concatenated_sequences

    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 6, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0]])
    hidden = torch.randn(4, 6, 5, requires_grad=True)
    rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(hidden, lengths)
    assert (cu_seqlens.tolist(), cu_seqlens.dtype, longest) == ([0, 2, 5, 11, 12, 13], torch.int32, 6)
    real = torch.arange(6) < torch.tensor([5, 0, 6, 2])[:, None]
    assert torch.equal(rows, hidden[real]) and torch.equal(indices, real.flatten().nonzero().flatten())
    assert torch.equal(pad_input(rows, indices, 4, 6), hidden * real[..., None])
    taken, whole = index_first_axis_residual(hidden.flatten(0, 1), indices)
    (gradient,) = torch.autograd.grad(taken.sum() + 2 * whole.sum(), hidden)
    assert torch.equal(taken, rows) and torch.equal(gradient, 2.0 + real[..., None].expand(4, 6, 5).float())
    assert unpad_input_for_concatenated_sequences(hidden[:1], lengths[1:2])[2:] == (torch.zeros(1), 0)
    for wrong in ([[5, 2, 0, 0, 0, 0]], [[-1, 2, 0, 0, 0, 0]]):
        with pytest.raises(wa.AttentionError, match=r"^attention_mask_in_length has a row \[(5|-1), 2, .*at most 6"):
            unpad_input_for_concatenated_sequences(hidden[:1], torch.tensor(wrong))


FUNCTIONS = [getattr(version2, name) for name in version2.__all__]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_dropout_is_refused(function):
    parameters = inspect.signature(function).parameters
    if "dropout_p" not in parameters:
        assert function is version2.flash_attn_with_kvcache
        return
    given = {name: None for name, p in parameters.items() if p.default is p.empty}
    with pytest.raises(wa.AttentionError, match=r"^dropout_p is 0.1; "):
        function(**given, dropout_p=0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window_size": (1, 2, 3)}, "window_size is"),
        ({"window_size": 4}, "window_size is 4"),
        ({"softcap": -1.0}, "cap is -1.0"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes has shape"),
        ({"softmax_scale": "x"}, "scale is 'x'"),
    ],
)
def test_wrong_values_are_named(given, message):
    with pytest.raises(wa.AttentionError, match=message):
        version2.flash_attn_func(*dense(), **given)


def test_errors_use_the_names_of_flash_attn():
    q, k, v = rows()
    with pytest.raises(wa.AttentionError, match=r"^cu_seqlens_k has dtype torch.int64"):
        version2.flash_attn_varlen_func(q, k, v, CU_Q, CU_K.long(), 4, 5)
    with pytest.raises(wa.AttentionError, match=r"max_seqlen_q is 2; sequence 0 has 3 rows by cu_seqlens_q"):
        version2.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 2, 5)


def test_wrong_calls_are_type_errors_as_in_python():
    q, k, v = dense()
    for args, named in (((q, k), {}), ((q, k, v), {"wrong": 1}), ((q, k, v), {"q": q}), ((q,) * 12, {})):
        with pytest.raises(TypeError):
            version2.flash_attn_func(*args, **named)


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (version2.flash_attn_qkvpacked_func, "qkv"),
        (version3.flash_attn_qkvpacked_func, "qkv"),
        (version2.flash_attn_kvpacked_func, "kv"),
        (version2.flash_attn_varlen_kvpacked_func, "kv"),
        (version2.flash_attn_varlen_qkvpacked_func, "qkv"),
        (version2.flash_attn_with_kvcache, "q"),
        (version2.flash_attn_with_kvcache, "cache_batch_idx"),
        (version3.flash_attn_with_kvcache, "cu_seqlens_q"),
        (version3.flash_attn_combine, "out"),
        (version4.flash_attn_combine, "lse_partial"),
        (version4.get_scheduler_metadata, "seqused_k"),
    ],
)
def test_what_is_no_tensor(function, argument):
    parameters = inspect.signature(function).parameters
    given = {p.name: torch.zeros(1, 1, 1, 1) for p in parameters.values() if p.default is p.empty}
    with pytest.raises(wa.AttentionError, match=f"^{argument} is 3; it must be a tensor"):
        function(**given | {argument: 3})
