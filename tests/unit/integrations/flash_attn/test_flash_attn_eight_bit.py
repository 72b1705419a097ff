"""8-bit keys and values in flash-attn 3: factors of sequences and heads, appending, pages."""

from itertools import product

import pytest
import torch

import warpattn as wa
from tests.drawn import drawn, each_once
from tests.unit.integrations.flash_attn.test_flash_attn_cache import HKV, LENGTHS, B, D, H, caches, expected_of, fresh
from tests.unit.integrations.flash_attn.test_flash_attn_versions import CU_K, CU_Q, USED_K
from warpattn.integrations.flash_attn import descaled, version3
from warpattn.problem import rules

E4M3 = torch.float8_e4m3fn
CALLS, BACKENDS = ("ragged", "batch", "packed"), ("reference", "simulate:sm90")


def eight_bit(k, v, differing=True):
    """8-bit caches, factors (batch, heads), and the fp32 tensors that they mean, for pages of one sequence each."""
    factors = [torch.rand(B, HKV) + 0.5 for _ in (k, v)]
    factors = factors if differing else [factor[:1].expand(B, -1) for factor in factors]
    values = [x.to(E4M3) for x in (k, v)]
    return values, factors, [x.float() * factor[:, None, :, None] for x, factor in zip(values, factors, strict=True)]


def test_dense_keys():
    q, (values, (k_descale, v_descale), meant) = fresh(2, H), eight_bit(*caches())
    out = version3.flash_attn_func(q, *values, k_descale=k_descale, v_descale=v_descale, causal=True)
    torch.testing.assert_close(out, version3.flash_attn_func(q, *meant, causal=True))


@pytest.mark.parametrize("used", [{}, {"seqused_k": USED_K}], ids=["all", "used"])
def test_ragged_keys(used):
    q, k, v = torch.randn(7, H, D), torch.randn(11, HKV, D).to(E4M3), torch.randn(11, HKV, D).to(E4M3)
    k_descale, v_descale = torch.rand(3, HKV) + 0.5, torch.rand(3, HKV) + 0.5
    starts = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 4, "max_seqlen_k": 5, **used}
    out = version3.flash_attn_varlen_func(q, k, v, **starts, k_descale=k_descale, v_descale=v_descale)
    counts = CU_K.diff().long()
    k, v = (
        x.float() * factor.repeat_interleave(counts, 0)[..., None] for x, factor in ((k, k_descale), (v, v_descale))
    )
    torch.testing.assert_close(out, version3.flash_attn_varlen_func(q, k, v, **starts))


@pytest.mark.parametrize("lengths", [LENGTHS, None], ids=["lengths", "none"])
@pytest.mark.parametrize("ragged", [False, True], ids=["batch", "ragged"])
def test_caches_with_factors_of_each_sequence(lengths, ragged):
    q, (values, (k_descale, v_descale), meant) = fresh(2, H), eight_bit(*caches())
    starts = {"cu_seqlens_q": torch.tensor([0, 1, 4, 6], dtype=torch.int32)} if ragged else {}
    out = version3.flash_attn_with_kvcache(
        q.flatten(0, 1) if ragged else q, *values, cache_seqlens=lengths, k_descale=k_descale, v_descale=v_descale,
        causal=True, **starts,
    )  # fmt: skip
    expected = version3.flash_attn_with_kvcache(
        q.flatten(0, 1) if ragged else q, *meant, cache_seqlens=lengths, causal=True, **starts
    )
    torch.testing.assert_close(out, expected)
    other = version3.flash_attn_with_kvcache(
        q.flatten(0, 1) if ragged else q, *values, cache_seqlens=lengths, k_descale=k_descale, causal=True, **starts
    )
    assert not torch.allclose(out, other)


@pytest.mark.parametrize("tokens", ["even", "ragged"])
def test_appending_to_8_bit_caches(tokens):
    """New keys are divided by the factor, rounded and written, in the kernel's way and in the one of ragged tokens."""
    q, new = fresh(2, H), [fresh(2), fresh(2)]
    values, (k_descale, v_descale), _ = eight_bit(*caches(), differing=False)
    starts = {"cu_seqlens_k_new": torch.tensor([0, 2, 4, 6], dtype=torch.int32)} if tokens == "ragged" else {}
    given = [x.flatten(0, 1) if starts else x for x in new]
    out = version3.flash_attn_with_kvcache(
        q, *values, *given, cache_seqlens=LENGTHS, k_descale=k_descale, v_descale=v_descale, **starts
    )
    keys = []
    for b, n in enumerate(LENGTHS.tolist()):
        pair = []
        for cache, x, factor in zip(values, new, (k_descale, v_descale), strict=True):
            assert torch.equal(cache[b, n : n + 2].float(), (x[b] / factor[b, :, None]).to(E4M3).float())
            pair.append(cache[b, : n + 2].float() * factor[b, :, None])
        keys.append(pair)
    torch.testing.assert_close(out, expected_of(q, keys)[0])


def narrow(q):
    """8-bit queries, their factor (batch, heads_kv), and what they mean."""
    factor = torch.rand(B, HKV) + 0.5
    values = q.to(E4M3)
    return values, factor, values.float() * factor[:, None].repeat_interleave(H // HKV, -1)[..., None]


def same(found, expected):
    """Of 8-bit queries in bf16, as in fp32 before it was rounded."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=1e-2, rtol=1e-2)


def test_queries_of_8_bits():
    """Dense, end to end, in one tensor with keys and values, and over caches with pages of their own."""
    (q, q_descale, q_meant), (values, factors, meant) = narrow(fresh(2, H)), eight_bit(*caches())
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), (q_descale, *factors), strict=True))
    expected = version3.flash_attn_func(q_meant, *meant, causal=True)
    same(version3.flash_attn_func(q, *values, **descales, causal=True), expected)
    found = version3.flash_attn_with_kvcache(q, *values, **descales, causal=True)
    same(found, expected)
    cu_q, cu_k = (torch.arange(B + 1, dtype=torch.int32) * n for n in (2, values[0].shape[1]))
    flat = [x.flatten(0, 1) for x in (q, *values)]
    out = version3.flash_attn_varlen_func(*flat, cu_q, cu_k, 2, values[0].shape[1], **descales, causal=True)
    same(out, expected.flatten(0, 1))
    qkv = torch.cat([fresh(2, H), fresh(2), fresh(2)], 2).to(E4M3)
    parts = [x.float() * descales[name][:, None].repeat_interleave(x.shape[2] // HKV, -1)[..., None]
             for name, x in zip(descales, qkv.split([H, HKV, HKV], 2), strict=True)]  # fmt: skip
    same(version3.flash_attn_qkvpacked_func(qkv, **descales, num_heads_q=H), version3.flash_attn_func(*parts))


@pytest.mark.parametrize(("call", "backend"), drawn(product(CALLS, BACKENDS), each_once(CALLS, BACKENDS)))
def test_the_backward_of_8_bits_is_refused_and_the_forward_is_not(call, backend, monkeypatch):
    """As in flash-attn, whose own tests give it 8-bit tensors that require gradients."""
    choose = rules.choose_backend
    monkeypatch.setattr(rules, "choose_backend", lambda noted, _, *rest: choose(noted, backend, *rest))
    q, k, v = (torch.randn(1, 40, heads, 64).to(E4M3) for heads in (2, 1, 1))
    plain, leaves = torch.cat([q, k, v], 2), []

    def run(trains):
        leaf = plain.clone().requires_grad_(trains)
        leaves.append(leaf)
        if call == "packed":
            return version3.flash_attn_qkvpacked_func(leaf, num_heads_q=2, causal=True, return_attn_probs=True)
        parts = leaf.split([2, 1, 1], 2)
        if call == "batch":
            return version3.flash_attn_func(*parts, causal=True, return_attn_probs=True)
        starts = torch.tensor([0, 40], dtype=torch.int32)
        flat = (x.flatten(0, 1).contiguous() for x in parts)
        return version3.flash_attn_varlen_func(*flat, starts, starts, 40, 40, causal=True, return_attn_probs=True)

    found, expected = run(True), run(False)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert [x.requires_grad for x in (*found, *expected)] == [True, True, False, False]
    with pytest.raises(wa.AttentionError, match="8 bits; flash-attn has no backward"):
        found[0].float().sum().backward()
    assert leaves[0].grad is None
    with torch.no_grad():
        assert not run(True)[0].requires_grad


@pytest.mark.parametrize("ragged", [False, True], ids=["batch", "ragged"])
def test_queries_of_8_bits_over_a_cache(ragged):
    """Of sequences with lengths, and with pages of a table, where the factors of keys are shared."""
    starts = {"cu_seqlens_q": torch.tensor([0, 1, 4, 6], dtype=torch.int32)} if ragged else {}
    q, q_descale, q_meant = narrow(fresh(2, H))
    if ragged:
        counts = starts["cu_seqlens_q"].diff().long()
        q, factor = q.flatten(0, 1), q_descale.repeat_interleave(counts, 0).repeat_interleave(H // HKV, -1)
        q_meant = q.float() * factor[..., None]
    values, (k_descale, v_descale), meant = eight_bit(*caches())
    tail = {"cache_seqlens": LENGTHS, "causal": True, **starts}
    found = version3.flash_attn_with_kvcache(
        q, *values, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, **tail
    )
    same(found, version3.flash_attn_with_kvcache(q_meant, *meant, **tail))
    table = torch.tensor([[7, 1, 0], [2, 9, 3], [4, 8, 5]], dtype=torch.int32)
    pages = [torch.randn(10, 4, HKV, D).to(E4M3) for _ in range(2)]
    found = version3.flash_attn_with_kvcache(q, *pages, q_descale=q_descale, page_table=table, **tail)
    same(found, version3.flash_attn_with_kvcache(q_meant, *(x.float() for x in pages), page_table=table, **tail))


def test_queries_that_are_rotated_have_16_bits():
    new, cos = fresh(1), torch.ones(12, D // 2)
    with pytest.raises(wa.AttentionError, match=r"^q has 8 bits; queries that are rotated have 16"):
        version3.flash_attn_with_kvcache(
            fresh(1, H).to(E4M3), *eight_bit(*caches())[0], new, new, rotary_cos=cos, rotary_sin=cos,
            cache_seqlens=LENGTHS,
        )  # fmt: skip


TABLE = torch.tensor([[7, 1, 0], [2, 9, 3], [4, 8, 5]], dtype=torch.int32)


def pages_of(k, v, size=4):
    """Pages that hold caches (B, 12, heads, dim) by TABLE, 0 elsewhere."""
    pages = [torch.zeros(10, size, HKV, D) for _ in (k, v)]
    for target, x in zip(pages, (k, v), strict=True):
        rows = torch.cat([x.float(), torch.zeros(B, -12 % size, HKV, D)], 1).unflatten(1, (-1, size))
        target[TABLE[:, : rows.shape[1]].long()] = rows
    return pages


@pytest.mark.parametrize(("differ", "backend"), [((True, True), "simulate:sm90"), *(
    (x, "reference") for x in product((True, False), (True, False)))], ids=str)  # fmt: skip
def test_8_bit_pages_and_factors_of_each_sequence(differ, backend, monkeypatch):
    """Over a page that two sequences share, too; softcap comes after the keys' factors."""
    choose = rules.choose_backend
    q, starts = fresh(2, H).bfloat16(), {"cu_seqlens_q": torch.tensor([0, 1, 4, 6], dtype=torch.int32)}
    values, factors, _ = eight_bit(*caches())
    factors = [x if apart else x[:1].repeat(B, 1) for x, apart in zip(factors, differ, strict=True)]
    pages, table = [x.to(E4M3) for x in pages_of(*values, 8)], TABLE[:, :2].clone()
    table[1, 0] = table[0, 0]
    given = dict(zip(("k_descale", "v_descale"), factors, strict=True))
    tail = {"cache_seqlens": LENGTHS, "causal": True, "softcap": 2.0, "return_softmax_lse": True}
    meant = [x.float()[table.long()].flatten(1, 2) * f[:, None, :, None] for x, f in zip(pages, factors, strict=True)]
    for rows, more in ((q, {}), (q.flatten(0, 1), starts)):
        monkeypatch.setattr(rules, "choose_backend", lambda noted, _, *rest: choose(noted, backend, *rest))
        out, lse, *_ = version3.flash_attn_with_kvcache(rows, *pages, page_table=table, **given, **tail, **more)
        monkeypatch.undo()
        expected, right, *_ = version3.flash_attn_with_kvcache(rows.float(), *meant, **tail, **more)
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, right, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("ragged", [False, True], ids=["batch", "ragged"])
@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("paged", [False, True], ids=["cache", "pages"])
def test_new_tokens_are_divided_by_the_factors_of_their_sequence(paged, rotary, ragged):
    values, factors, _ = eight_bit(*caches())
    stored = [x.to(E4M3) for x in pages_of(*values)] if paged else [x.clone() for x in values]
    start = LENGTHS.clamp(max=7)
    counts = [1, 3, 2] if ragged else [2, 2, 2]
    new = [torch.randn(sum(counts), HKV, D).bfloat16() for _ in range(2)]
    cos, sin = (f(torch.rand(16, D // 2)).bfloat16() for f in (torch.cos, torch.sin))
    given = {"rotary_cos": cos, "rotary_sin": sin} if rotary else {}
    given |= {"cu_seqlens_k_new": torch.tensor([0, 1, 4, 6], dtype=torch.int32)} if ragged else {}
    given |= {"page_table": TABLE} if paged else {}
    version3.flash_attn_with_kvcache(
        fresh(2, H).bfloat16(), *stored, *(x if ragged else x.unflatten(0, (B, 2)) for x in new), cache_seqlens=start,
        k_descale=factors[0], v_descale=factors[1], **given,
    )  # fmt: skip
    caches_now = [x[TABLE.long()].flatten(1, 2) if paged else x for x in stored]
    row = 0
    for b, count in enumerate(counts):
        for t in range(count):
            at = int(start[b]) + t
            for name, x, cache, factor in zip("kv", new, caches_now, factors, strict=True):
                wanted = x[row].float()
                if rotary and name == "k":
                    first, second = wanted[:, 0::2], wanted[:, 1::2]
                    c, s = cos[at].float(), sin[at].float()
                    wanted = torch.stack([first * c - second * s, second * c + first * s], -1).flatten(-2)
                torch.testing.assert_close(cache[b, at].float(), (wanted / factor[b, :, None]).to(E4M3).float(),
                                           atol=1e-6, rtol=0.13)  # fmt: skip
            row += 1


def test_new_tokens_of_8_bits_stay_as_they_are():
    """As in flash-attn, whose new keys have the dtype of its queries."""
    values, factors, _ = eight_bit(*caches())
    new, stored = [fresh(2).to(E4M3) for _ in range(2)], [x.clone() for x in values]
    given = {"cache_seqlens": LENGTHS.clamp(max=7), "k_descale": factors[0], "v_descale": factors[1], "causal": True}
    q = fresh(2, H)
    out = version3.flash_attn_with_kvcache(q, *stored, *new, **given)
    for b in range(B):
        at = int(given["cache_seqlens"][b])
        for cache, x in zip(stored, new, strict=True):
            assert torch.equal(cache[b, at : at + 2].float(), x[b].float())
    given["cache_seqlens"] = given["cache_seqlens"] + 2
    torch.testing.assert_close(out, version3.flash_attn_with_kvcache(q, *stored, **given))
    for wrong in ({"rotary_cos": torch.ones(16, D // 2), "rotary_sin": torch.ones(16, D // 2)}, {}):
        cache = stored if wrong else [x.to(torch.float8_e5m2) for x in stored]
        with pytest.raises(wa.AttentionError, match=r"k has dtype torch.float8_e4m3fn; new keys and values"):
            version3.flash_attn_with_kvcache(q, *cache, *new, **given, **wrong)


def test_equal_factors_are_recognised_without_reading_them():
    """Of a stride of 0, which needs no memory: a meta tensor has no values that could be read."""
    k = torch.empty(4, 2, HKV, D, dtype=E4M3, device="meta")
    factor = torch.empty(1, HKV, device="meta")
    shared, differing = factor.expand(B, -1), factor.repeat(B, 1)
    scaled, _ = descaled.of_pages(k, k, B, descaled.Factors(shared, None))
    assert scaled.scale.shape == (HKV,)
    assert descaled.beside(descaled.Factors(shared, None), H) == descaled.Factors(None, None)
    assert descaled.beside(descaled.Factors(differing, None), H).k.shape == (B, H)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k_descale": torch.ones(B)}, r"^k_descale is .*; it must be torch.float32 of shape \(3, 2\)"),
        ({"k_descale": torch.ones(B, HKV).double()}, "^k_descale is .*; it must be torch.float32"),
        ({"v_descale": 0.5}, "^v_descale is 0.5; it must be torch.float32"),
        (
            {"v_descale": torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])},
            r"^v_descale\[1, 1\] is 0.0; a scale must be positive",
        ),
        ({"k_descale": torch.ones(B, HKV), "qv": torch.ones(B, 2, H, D)}, "^qv is given; with it q_descale"),
        ({"q_descale": torch.ones(B, HKV)}, "^q_descale is .*; the queries have dtype torch.float32 and not 8 bits"),
    ],
)
def test_factors_that_do_not_fit(given, message):
    values, _, _ = eight_bit(*caches())
    with pytest.raises(wa.AttentionError, match=message):
        version3.flash_attn_func(fresh(2, H), *values, **given)


@pytest.mark.parametrize(
    ("k", "message"), [(None, "^k is None"), (torch.zeros(B, HKV, D).to(E4M3), "k has shape")]
)
def test_faults_of_keys_are_named_first(k, message):
    with pytest.raises(wa.AttentionError, match=message):
        version3.flash_attn_func(fresh(2, H), k, fresh(2).to(E4M3), k_descale=torch.ones(B, HKV))


def test_factors_without_a_tensor_of_8_bits_are_ignored():
    """As in flash-attn 3."""
    q, (k, v), factor = fresh(2, H), caches(), torch.rand(B, HKV) + 0.5
    factors = dict.fromkeys(("q_descale", "k_descale", "v_descale"), factor)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    starts = [torch.arange(B + 1, dtype=torch.int32) * x.shape[1] for x in (q, k)]
    for call, args in (
        (version3.flash_attn_func, (q, k, v)),
        (version3.flash_attn_varlen_func, (*flat, *starts, q.shape[1], k.shape[1])),
        (version3.flash_attn_with_kvcache, (q, k, v)),
    ):
        assert torch.equal(call(*args, **factors), call(*args))
