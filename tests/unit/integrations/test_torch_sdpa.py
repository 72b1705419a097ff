"""torch's scaled_dot_product_attention served by us: as a function, swapped in, and through torch's registry."""

import inspect
import warnings

import pytest
import torch
from torch.nn import attention as registry
from torch.nn import functional as F

import warpattn as wa
from warpattn.integrations import torch_flash, torch_sdpa
from warpattn.integrations.torch_sdpa import scaled_dot_product_attention

B, H, L, S, E, EV = 2, 4, 5, 7, 16, 8
INPLACE = "_flash_attention_forward_no_dropout_inplace"


def qkv(lead=(B, H), kv=None, rows=L, keys=S):
    kv = lead if kv is None else kv
    return torch.randn(*lead, rows, E), torch.randn(*kv, keys, E), torch.randn(*kv, keys, EV)


@pytest.fixture
def _active():
    torch_sdpa.register()
    registry.activate_flash_attention_impl("warpattn")
    yield
    registry.restore_flash_attention_impl()


@pytest.mark.parametrize("lead", [(), (3,), (B, H), (2, 3, H)], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_leading_dimensions_and_options(lead, options):
    q, k, v = qkv(lead)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, **options),
                               F.scaled_dot_product_attention(q, k, v, **options))  # fmt: skip


@pytest.mark.parametrize("kv", [(1, H), (B, 1), (H,), (1, 1), ()], ids=str)
def test_keys_broadcast(kv):
    q, k, v = qkv(kv=kv)
    mask = torch.rand(L, S) > 0.3
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask),
                               F.scaled_dot_product_attention(q, k, v, mask))  # fmt: skip


def test_grouped_heads():
    q, k, v = qkv((2, B, H), (2, B, 2))
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    with pytest.raises(wa.AttentionError, match=r"^query, key and value have shapes .* enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    "shape", [(L, S), (1, S), (L, 1), (H, L, S), (B, 1, L, S), (B, H, L, S), (1, H, 1, S)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_masks_broadcast(shape, dtype):
    q, k, v = qkv()
    mask = torch.rand(shape) > 0.3 if dtype == torch.bool else torch.randn(shape)
    seen = F.scaled_dot_product_attention(q, k, v, mask).nan_to_num(0.0)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), seen)


def test_masks_of_more_leading_dimensions():
    q, k, v = qkv((2, 3, H))
    for shape in ((2, 3, H, L, S), (2, 1, 1, L, S), (3, H, L, S)):
        mask = torch.rand(shape) > 0.3
        expected = F.scaled_dot_product_attention(q, k, v, mask).nan_to_num(0.0)
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), expected)


def test_a_row_that_sees_nothing_is_zero():
    q, k, v = qkv()
    mask = torch.ones(L, S, dtype=torch.bool)
    mask[2] = False
    out = scaled_dot_product_attention(q, k, v, mask)
    assert torch.equal(out[:, :, 2], torch.zeros(B, H, EV))
    torch.testing.assert_close(out[:, :, 3], F.scaled_dot_product_attention(q, k, v)[:, :, 3])


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (qkv(), {"dropout_p": 0.1}, r"^dropout_p is 0.1; "),
        (qkv(), {"attn_mask": torch.ones(L, S) > 0, "is_causal": True}, "^attn_mask is given with is_causal"),
        (qkv(), {"attn_mask": torch.ones(S, dtype=torch.bool)}, r"^attn_mask has .* to \(\d, \d, L, S\)"),
        (qkv(), {"attn_mask": torch.ones(B, B, H, L, S)}, "^attn_mask has shape"),
        (qkv((1, B, H)), {"attn_mask": torch.ones(B, 1, 1, L, S)}, r"^attn_mask has shape \(2, 1, 1, "),
        (qkv(), {"attn_mask": "causal"}, "^attn_mask is a str"),
        (qkv(), {"attn_mask": torch.ones(L, S, dtype=torch.int32)}, "^attn_mask has dtype torch.int32"),
        ((torch.randn(E), torch.randn(E), torch.randn(E)), {}, "- query is a tensor of shape"),
        (("q", "k", "v"), {}, "- query is a str"),
        (qkv(), {"scale": "x"}, "^scale is 'x'"),
        ((*qkv()[:2], qkv()[2][:, :, 1:]), {}, "^value has .*; value must have as many keys as key, "),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(args, options, message):
    with pytest.raises(wa.AttentionError, match=message):
        scaled_dot_product_attention(*args, **options)


def test_every_broken_rule_is_listed():
    with pytest.raises(wa.AttentionError) as error:
        scaled_dot_product_attention(torch.randn(E), *qkv()[1:], torch.ones(L, S) > 0, 0.1, True, enable_gqa="x")
    assert [reason.split()[0] for reason in error.value.reasons] == ["dropout_p", "enable_gqa", "query"]


def jagged(total=9, offsets=(0, 4, 9), dim=E, starts=None, heads=H):
    starts = torch.tensor(offsets) if starts is None else starts
    values = torch.randn(total, heads, dim, requires_grad=True)
    return torch.nested.nested_tensor_from_jagged(values, starts).transpose(1, 2), values, starts


@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_tensors(is_causal):
    q, q_values, starts = jagged()
    k, k_values, keys = jagged(11, (0, 5, 11))
    v, v_values, _ = jagged(11, dim=EV, starts=keys)
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert out.is_nested
    assert out.shape[1:2] == (H,)
    for b in range(2):
        mine, theirs = slice(starts[b], starts[b + 1]), slice(keys[b], keys[b + 1])
        one = [x[i].transpose(0, 1) for x, i in ((q_values, mine), (k_values, theirs), (v_values, theirs))]
        expected = F.scaled_dot_product_attention(*one, is_causal=is_causal)
        torch.testing.assert_close(out[b], expected)
    (gradient,) = torch.autograd.grad(out.values().square().sum(), q_values)
    assert (gradient != 0).any()


def test_nested_tensors_that_are_refused():
    q, _, _ = jagged()
    with pytest.raises(wa.AttentionError, match=r"^attn_mask is given with nested"):
        scaled_dot_product_attention(q, q, q, torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(wa.AttentionError, match=r"^key has layout torch.strided"):
        scaled_dot_product_attention(q, torch.randn(2, H, 4, E), torch.randn(2, H, 4, E))
    with pytest.raises(wa.AttentionError, match=r"^query has rank 4"):
        scaled_dot_product_attention(q.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2))
    with pytest.raises(wa.AttentionError, match=r"^value has other lengths than key"):
        scaled_dot_product_attention(q, q, jagged(9, (0, 3, 9))[0])


@pytest.mark.parametrize(("keys", "values"), [(2, 2), (2, 1), (1, 1)])
def test_grouped_heads_of_jagged_tensors(keys, values):
    (q, *_), (k, *_), (v, *_) = (jagged(heads=heads) for heads in (4, keys, values))
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for b in range(2):
        expected = F.scaled_dot_product_attention(q[b], k[b], v[b], enable_gqa=True)
        torch.testing.assert_close(out[b], expected)
    if keys > 1:
        with pytest.raises(wa.AttentionError, match=rf"^query has 4 heads, key {keys} and value {values}; enable_gqa="):
            scaled_dot_product_attention(q, k, v)


def test_the_dtype_of_an_autocast_region_for_jagged_tensors():
    q, _, _ = jagged()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q[1], q[1], q[1])
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out[1], expected, atol=2e-2, rtol=2**-7)


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("case", ["plain", "causal", "more keys", "mask", "causal mask", "grouped"])
def test_registry_serves_the_cpu_with_gradients(case):
    keys = S if case in ("more keys", "mask", "causal mask") else L
    heads = 2 if case == "grouped" else H
    q, k, v = (torch.randn(B, h, n, E, requires_grad=True) for h, n in ((H, L), (heads, keys), (heads, keys)))
    options = {
        "is_causal": case in ("causal", "more keys", "causal mask"), "scale": 0.4, "enable_gqa": case == "grouped",
        "attn_mask": {"mask": torch.rand(L, S) > 0.3, "causal mask": torch.randn(B, 1, L, S)}.get(case),
    }  # fmt: skip
    weight = torch.randn(B, H, L, E)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        whole = torch_flash.attention
        patch.setattr(torch_flash, "attention", lambda *args, **named: seen.append(named) or whole(*args, **named))
        out = F.scaled_dot_product_attention(q, k, v, **options)
        gradients = torch.autograd.grad(out, (q, k, v), weight)
    assert len(seen) == 1
    registry.restore_flash_attention_impl()
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(out, expected)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, (q, k, v), weight), strict=True):
        torch.testing.assert_close(mine, theirs)
    registry.activate_flash_attention_impl("warpattn")  # as the fixture left it


@pytest.mark.parametrize("window", [(None, None), (3, 0)])
def test_gradients_of_the_varlen_operators(window):
    """What `torch.nn.attention.varlen` calls: autograd's formula of the forward operator calls the backward one."""
    torch_sdpa.register()
    registry.activate_flash_attention_impl("warpattn")
    starts = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    sizes = dict(zip(("window_size_left", "window_size_right"), window, strict=True))
    try:
        q, k, v = (torch.randn(11, heads, E, requires_grad=True) for heads in (4, 2, 2))
        flash = torch.ops.aten._flash_attention_forward
        out, lse, *state, _ = flash(q, k, v, starts, starts, 7, 7, 0.0, True, False, **sizes)
        weight = torch.randn_like(out)
        args = (weight, q, k, v, out, lse, starts, starts, 7, 7, 0.0, True, *state)
        found = torch.ops.aten._flash_attention_backward(*(x.detach() if hasattr(x, "detach") else x for x in args),
                                                         **sizes)  # fmt: skip
    finally:
        registry.restore_flash_attention_impl()
    mask = wa.Causal() if window[0] is None else wa.SlidingWindow(window[0] + 1)
    truth = wa.attention_varlen(q, k, v, wa.Ragged(starts), mask=mask)
    for mine, theirs in zip(found, torch.autograd.grad(truth, (q, k, v), weight), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_backward_operator_of_cuda():
    """The function itself, on CPU tensors, for the same reason as the forward's."""
    q, k, v = (torch.randn(B, H, n, E, requires_grad=True) for n in (L, S, S))
    out = wa.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=wa.Causal(top_left=True), return_lse=True)
    weight = torch.randn(B, H, L, E)
    expected = torch.autograd.grad(out[0], (q, k, v), weight.transpose(1, 2), retain_graph=True)
    args = (weight, q, k, v, out[0].transpose(1, 2), out[1])
    found = torch_flash._sdpa_backward_cuda(*(x.detach() for x in args), None, None, L, S, 0.0, True, None, None)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def strides(results):
    return [(x.shape, x.stride(), x.dtype) for x in results]


@pytest.mark.usefixtures("_active")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)], ids=str)
def test_results_are_laid_out_as_torch_promises_compiled_programs(order):
    """Against what the operators say of tensors without values."""
    aten, back = torch.ops.aten, [order.index(i) for i in range(4)]
    rows = (B, H, L, E)
    q, k, v, d_out = (torch.randn([rows[i] for i in order]).permute(back) for _ in range(4))
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = forward(q, k, v)
    assert strides((out, lse)) == strides(forward(*(x.to("meta") for x in (q, k, v))))
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    args = (d_out, q, k, v, out, lse)
    assert strides(backward(*args, 0.0, True)) == strides(backward(*(x.to("meta") for x in args), 0.0, True))
    starts = torch.tensor([0, 2, H], dtype=torch.int32)
    for seqs, one in (((None, None, H, H), (q, k, v)), ((starts, starts, 2, 2), (q[0], k[0], v[0]))):
        bare = [x if x is None or isinstance(x, int) else x.to("meta") for x in seqs]
        flash, flash_back = aten._flash_attention_forward, aten._flash_attention_backward
        out, lse, *state, _ = flash(*one, *seqs, 0.0, False, False)
        expected = flash(*(x.to("meta") for x in one), *bare, 0.0, False, False)
        assert strides((out, lse)) == strides(expected[:2])
        if seqs[0] is not None:
            found = flash_back(out, *one, out, lse, *seqs, 0.0, False, *state)
            assert strides(found) == strides(torch.empty_like(x) for x in one)
    found = torch_flash._sdpa_backward_cuda(*args, None, None, L, L)
    assert strides(found) == strides(torch.empty_like(x) for x in (q, k, v))


@pytest.mark.usefixtures("_active")
def test_errors_name_the_operators_arguments():
    flash, q = torch.ops.aten._flash_attention_forward, torch.randn(9, H, E)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    with pytest.raises(wa.AttentionError, match=r"cum_seq_q\[0\] is 1; cum_seq_q must start at 0"):
        flash(q, q, q, starts + 1, starts, 5, 5, 0.0, False, False)
    with pytest.raises(wa.AttentionError, match=r"^max_q is 3; sequence 0 has 4 rows by cum_seq_q"):
        flash(q, q, q, starts, starts, 3, 5, 0.0, False, False)
    with pytest.raises(wa.AttentionError, match=r"^key has dtype torch.float64; key must have the dtype of query"):
        flash(q, q.double(), q, starts, starts, 5, 5, 0.0, False, False)
    pages, table, used = torch.randn(2, 4, H, E), torch.tensor([[0], [7]], dtype=torch.int32), starts.diff() - 1
    with pytest.raises(wa.AttentionError, match=r"^block_table\[1, 0\] is 7; "):
        flash(q, pages, pages, starts, None, 5, 4, 0.0, False, False, seqused_k=used, block_table=table)
    with pytest.raises(wa.AttentionError, match=r"seqused_k\[0\] is 5; "):
        flash(q, pages, pages, starts, None, 5, 4, 0.0, False, False, seqused_k=used + 2, block_table=table * 0)


def test_gradients_of_several_row_tiles(monkeypatch):
    monkeypatch.setattr("warpattn.reference.TILE_SCORES", 1)
    torch_sdpa.register()
    registry.activate_flash_attention_impl("warpattn")
    try:
        q, k, v = (torch.randn(B, H, L, E, requires_grad=True) for _ in range(3))
        weight = torch.randn(B, H, L, E)
        gradients = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), weight)
    finally:
        registry.restore_flash_attention_impl()
    expected = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), weight)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_registry_gives_torch_its_own_back():
    torch_sdpa.register("again")
    assert "again" in registry.list_flash_attention_impls()
    registry.activate_flash_attention_impl("again")
    assert registry.current_flash_attention_impl() == "again"
    registry.restore_flash_attention_impl()
    q, k, v = qkv()
    with pytest.raises(NotImplementedError):
        torch.ops.aten._flash_attention_forward(q, k, v, None, None, L, S, 0.0, False, False)


@pytest.mark.parametrize(("enabled", "chosen", "warned"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_a_varlen_attn_that_takes_cudnn_is_one_warning(enabled, chosen, warned, monkeypatch):
    from torch.nn.attention import varlen

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled)
    monkeypatch.setattr(varlen, "_should_use_cudnn", lambda device: chosen, raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_flash.put_in_place().remove()
    assert [str(x.message).partition("'s varlen_attn takes cuDNN")[0] for x in caught] == [
        f"torch {torch.__version__}"
    ] * warned


@pytest.mark.usefixtures("_active")
def test_ragged_operators():
    from torch.nn.attention.varlen import varlen_attn

    if "seqused_k" not in inspect.signature(varlen_attn).parameters:
        pytest.skip(f"varlen_attn of torch {torch.__version__} takes no lengths and no pages")
    q, k, v = torch.randn(7, H, E), torch.randn(11, H, E), torch.randn(11, H, E)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 7], [0, 5, 11]))
    out = varlen_attn(q, k, v, cu_q, cu_k, 4, 6, window_size=(-1, 0), scale=0.4)
    expected = wa.attention_varlen(q, k, v, wa.Ragged(cu_q, cu_k), mask=wa.Causal(), scale=0.4)
    torch.testing.assert_close(out, expected)
    used = torch.tensor([2, 6], dtype=torch.int32)
    out = varlen_attn(q, k, v, cu_q, cu_k, 4, 6, seqused_k=used)
    for b, n in enumerate((2, 6)):
        mine, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b]) + n)
        torch.testing.assert_close(out[mine], wa.attention(q[None, mine], k[None, keys], v[None, keys])[0])
    pages = torch.randn(4, 4, H, E), torch.randn(4, 4, H, E)
    table = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    out = varlen_attn(q[:4], *pages, torch.tensor([0, 2, 4], dtype=torch.int32), None, 2, 8,
                      seqused_k=used, block_table=table, window_size=(2, 0))  # fmt: skip
    paged = wa.attention_paged(q[:4].view(2, 2, H, E), wa.PagedKV(*pages, table, used), mask=wa.SlidingWindow(3))
    torch.testing.assert_close(out, paged.flatten(0, 1))


@pytest.mark.skipif(not hasattr(torch.ops.aten, INPLACE), reason=f"torch {torch.__version__} has no {INPLACE}")
@pytest.mark.usefixtures("_active")
def test_dense_operators_and_what_they_refuse():
    flash, inplace = torch.ops.aten._flash_attention_forward, getattr(torch.ops.aten, INPLACE)
    q, k, v = (torch.randn(B, n, H, E) for n in (L, S, S))
    slopes = torch.rand(H)
    args = (q, k, v, None, None, L, S, 0.0, True, False)
    out, lse, *_ = flash(*args, alibi_slopes=slopes)
    expected, expected_lse = wa.attention(q, k, v, mask=wa.Causal(), score=wa.ALiBi(slopes), return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    given = torch.full_like(q, torch.nan)
    torch.testing.assert_close(inplace(given, *args, alibi_slopes=slopes), expected_lse)
    torch.testing.assert_close(given, expected)
    with pytest.raises(wa.AttentionError, match=r"^dropout_p is 0.1"):
        flash(*args[:7], 0.1, True, False)
    with pytest.raises(wa.AttentionError, match=r"^return_debug_mask is True"):
        flash(*args[:9], True)
    with pytest.raises(wa.AttentionError, match="alibi_slopes is given and an input requires a gradient"):
        flash(q.requires_grad_(), *args[1:], alibi_slopes=slopes)


@pytest.mark.skipif("quantized" not in torch.ops.aten._flash_attention_forward.overloads(), reason="no such overloads")
@pytest.mark.usefixtures("_active")
def test_overloads_of_8_bits():
    """A factor for each head of each sequence, with queries of 16 bits or of 8, whose result is in bf16."""
    q, (k, v) = torch.randn(B, L, H, E), (torch.randn(B, S, H, E).to(torch.float8_e4m3fn) for _ in range(2))
    factors = [torch.rand(B, H) + 0.5 for _ in (k, v)]
    meant = [x.float() * factor[:, None, :, None] for x, factor in zip((k, v), factors, strict=True)]
    expected = [wa.attention(q, *meant, mask=wa.Causal(top_left=each)) for each in (False, True)]
    flash, sdpa = torch.ops.aten._flash_attention_forward.quantized, torch_flash._sdpa_quantized
    dense = (None, None, L, S, 0.0, True, False)
    torch.testing.assert_close(flash(q, k, v, *dense, None, *factors)[0], expected[0])
    out = sdpa(*(x.transpose(1, 2) for x in (q, k, v)), None, *factors, 0.0, True)[0]
    torch.testing.assert_close(out.transpose(1, 2), expected[1])
    starts = [torch.arange(B + 1, dtype=torch.int32) * n for n in (L, S)]
    flat = (x.flatten(0, 1) for x in (q, k, v))
    torch.testing.assert_close(flash(*flat, *starts, *dense[2:], None, *factors)[0], expected[0].flatten(0, 1))
    q8, factor = q.to(torch.float8_e4m3fn), torch.rand(B, H) + 0.5
    wide = q8.float() * factor[:, None, :, None]
    found = flash(q8, k, v, *dense, factor, *factors)[0]
    assert torch.equal(found, wa.attention(wide, *meant, mask=wa.Causal()).bfloat16())
    found = sdpa(*(x.transpose(1, 2) for x in (q8, k, v)), factor, *factors, 0.0, True)[0]
    assert torch.equal(found.transpose(1, 2), wa.attention(wide, *meant, mask=wa.Causal(top_left=True)).bfloat16())
    with pytest.raises(wa.AttentionError, match=r"^q_descale is .*; the queries have dtype torch.float32"):
        flash(q, k, v, *dense, torch.ones(B, H), *factors)


def test_the_operator_of_cuda_gives_what_torch_expects():
    """The function itself, on CPU tensors: CUDA's operator has no other place to run here."""
    q, k, v = (torch.randn(B, L, H, E).transpose(1, 2) for _ in range(3))
    results = torch_flash._sdpa_cuda(q, k, v, 0.0, True, scale=0.4)
    out, lse, starts_q, starts_k, longest_q, longest_k, state, unused, debug = results
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.4))
    assert out.stride() == q.stride()
    _, expected = wa.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=wa.Causal(), scale=0.4, return_lse=True)
    torch.testing.assert_close(lse, expected)
    assert (starts_q, starts_k, longest_q, longest_k) == (None, None, L, L)
    assert [(x.dtype, tuple(x.shape)) for x in (state, unused)] == [(torch.uint64, (2,)), (torch.uint64, ())]
    assert debug.numel() == 0
