"""What flex_attention returns beside its values: dtype, memory layout and auxiliary results, as FlexAttention."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn.attention import flex_attention as flex

import warpattn as wa
from warpattn import reference
from warpattn.integrations.flex import call, flex_attention

B, H, S, D, DV = 2, 3, 8, 16, 24
ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (2, 1, 0, 3), (1, 2, 0, 3)]


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    """FlexAttention itself, uncompiled and without a warning about it."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def shuffled(shape, order):
    """Random numbers whose dimensions lie in memory in the given order."""
    return torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(4)])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # by torch.autograd.forward_ad
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_the_output_has_the_order_of_dimensions_of_the_query(order):
    q, k, v = shuffled((B, H, S, D), order), torch.randn(B, H, S, D), torch.randn(B, H, S, DV)
    expected = flex.flex_attention(q, k, v)
    gain, zeros = torch.ones(1, requires_grad=True), torch.zeros(1, S, S, requires_grad=True)
    plain = flex_attention(q, k, v)
    with_gradients = (flex_attention(q.clone().requires_grad_(), k, v),
                      flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * gain[0]),
                      flex_attention(q, k, v, block_mask=wa.Materialized(zeros)))  # fmt: skip
    for out in (plain, *with_gradients):
        torch.testing.assert_close(out, expected)
        assert out.stride() == expected.stride()
    assert all(out.requires_grad for out in with_gradients)
    along, _ = torch.func.jvp(lambda x: flex_attention(x, k, v), (q,), (torch.ones_like(q),))
    torch.testing.assert_close(along, expected)
    with forward_ad.dual_level():
        dual = flex_attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        assert forward_ad.unpack_dual(dual).tangent is not None


@pytest.mark.parametrize("dtypes", [("float32",) * 3, ("float32", "float32", "bfloat16"), ("float64",) * 3], ids=str)
def test_an_autocast_region_sets_the_dtype(dtypes):
    q, k, v = (torch.randn(B, H, S, D, dtype=getattr(torch, name)) for name in dtypes)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = (attend(q, k, v) for attend in (flex_attention, flex.flex_attention))
        trained = flex_attention(q.requires_grad_(), k, v)
    assert out.dtype == trained.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    (gradient,) = torch.autograd.grad(trained.sum(), q)
    assert gradient.dtype == q.dtype


@pytest.mark.parametrize("options", [None, {}, {"BLOCK_M": 64, "fwd_num_warps": 8, "BACKEND": "AUTO"}], ids=str)
def test_options_of_flex_attentions_kernels_change_nothing(options):
    qkv = [torch.randn(B, H, S, D) for _ in range(3)]
    torch.testing.assert_close(flex_attention(*qkv, kernel_options=options), flex.flex_attention(*qkv))


def test_an_lse_is_computed_only_for_the_caller(monkeypatch):
    """A forward without one is faster."""
    wanted = []

    def attention(*args, return_lse, **options):
        wanted.append(return_lse)
        return wa.attention(*args, return_lse=return_lse, **options)

    monkeypatch.setattr(call, "attention", attention)
    qkv = [torch.randn(B, H, S, D) for _ in range(3)]
    out = flex_attention(*qkv)
    assert torch.equal(flex_attention(*qkv, return_lse=True)[0], out)
    assert flex_attention(*qkv, return_aux=flex.AuxRequest())[1] == flex.AuxOutput()
    assert flex_attention(*qkv, return_aux=flex.AuxRequest(lse=True))[1].lse.shape == (B, H, S)
    assert wanted == [False, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_largest_scores(dtype, monkeypatch):
    """Beside scores written out, over several tiles of rows and keys; no gradient reaches them, as in torch."""
    monkeypatch.setattr(reference, "TILE_SCORES", 1 << 14)
    monkeypatch.setattr(reference, "TILE_KEYS", 64)
    q, k, v = (torch.randn(B, heads, 150, D, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    rows, keys = torch.arange(150)[:, None], torch.arange(150)
    seen, bias = (keys <= rows) & (rows > 5), torch.randn(4, 150).to(dtype)
    mask = flex.create_block_mask(lambda b, h, i, j: (j <= i) & (i > 5), None, None, 150, 150, "cpu", BLOCK_SIZE=16)
    exact = torch.promote_types(dtype, torch.float32)
    scores = 0.3 * q.to(exact) @ k.repeat_interleave(2, 1).to(exact).mT
    for options, expected in (({}, scores), ({"score_mod": lambda s, b, h, i, j: s + bias[h, j], "block_mask": mask},
                              (scores + bias[:, None]).masked_fill(~seen, -torch.inf))):  # fmt: skip
        wanted = flex.AuxRequest(lse=True, max_scores=True)
        out, aux = flex_attention(q, k, v, scale=0.3, enable_gqa=True, return_aux=wanted, **options)
        torch.testing.assert_close(aux.max_scores, expected.amax(-1).detach())
        assert out.requires_grad and aux.lse.shape == aux.max_scores.shape and not aux.max_scores.requires_grad
    assert (aux.max_scores[:, :, :6] == -torch.inf).all()
    _, aux = flex_attention(q[:0], k[:0], v[:0], enable_gqa=True, return_aux=flex.AuxRequest(max_scores=True))
    assert aux.lse is None and aux.max_scores.shape == (0, 4, 150)


def test_errors_have_the_names_of_arguments_and_those_of_users_code_stay():
    q, k = torch.randn(B, H, S, D), torch.randn(B, 2, S, D + 1)
    with pytest.raises(wa.AttentionError, match=r"(?s)value has 7 keys.*query has 3 heads and key has 2.*of query, 16"):
        flex_attention(q, k, k[:, :, 1:], enable_gqa=True)
    with pytest.raises(wa.AttentionError, match=r"ValueError: .* 'k'"):
        flex_attention(q, q, q, score_mod=lambda *_: int("k"))
