"""flash_attn_with_kvcache of the versions 2 and 3: appending, rotation, pages, lengths, in place."""

import pytest
import torch

import warpattn as wa
from tests.unit.integrations.flash_attn import flash_attn_truth as truth
from warpattn.integrations.flash_attn import version2, version3

B, CAPACITY, H, HKV, D = 3, 12, 4, 2, 16
LENGTHS = torch.tensor([5, 0, 8], dtype=torch.int32)
ROOM = 16  # rows of the rotary tables


def caches(batch=B):
    return torch.randn(batch, CAPACITY, HKV, D), torch.randn(batch, CAPACITY, HKV, D)


def fresh(seq, heads=HKV):
    return torch.randn(B, seq, heads, D)


def rotated(x, positions, cos, sin, interleaved):
    """Token by token, pair by pair, as the documentation says: x [S, H, D], positions [S]."""
    out = x.clone()
    half = cos.shape[1]
    for token, position in enumerate(positions):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            c, s = cos[position, i], sin[position, i]
            out[token, :, a] = x[token, :, a] * c - x[token, :, b] * s
            out[token, :, b] = x[token, :, a] * s + x[token, :, b] * c
    return out


def expected_of(q, keys, **meaning):
    """Per sequence: q [B, S, H, D] over the given (k, v) lists."""
    results = [truth.attend(q[b], *keys[b], **meaning) for b in range(len(q))]
    return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


@pytest.mark.parametrize("lengths", [LENGTHS, 6, None], ids=["tensor", "int", "none"])
def test_lengths(lengths):
    q, (k, v) = fresh(2, H), caches()
    out, lse = version2.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, causal=True, softcap=0.8, softmax_scale=0.3, return_softmax_lse=True
    )
    counts = LENGTHS.tolist() if lengths is LENGTHS else [lengths or CAPACITY] * B
    keys = [(k[b, :n], v[b, :n]) for b, n in enumerate(counts)]
    expected, expected_lse = expected_of(q, keys, keep=truth.causal, softcap=0.8, scale=0.3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    alone = version2.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, softcap=0.8,
                                             softmax_scale=0.3)  # fmt: skip
    assert torch.equal(alone, out)


def test_appending_writes_the_cache_in_place():
    q, (k, v), k_new, v_new = fresh(3, H), caches(), fresh(3), fresh(3)
    before_k, before_v = k.clone(), v.clone()
    slopes = torch.rand(H)
    out = version2.flash_attn_with_kvcache(
        q, k, v, k_new, v_new, cache_seqlens=LENGTHS, causal=True, window_size=(4, 0), alibi_slopes=slopes
    )
    keys = []
    for b, n in enumerate(LENGTHS.tolist()):
        before_k[b, n : n + 3], before_v[b, n : n + 3] = k_new[b], v_new[b]
        keys.append((k[b, : n + 3], v[b, : n + 3]))
    assert torch.equal(k, before_k)
    assert torch.equal(v, before_v)
    torch.testing.assert_close(out, expected_of(q, keys, keep=truth.window(4, 0), slopes=slopes)[0])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (3, 2)}, {}], ids=str)
def test_rotation(interleaved, options):
    q, (k, v), k_new, v_new = fresh(2, H), caches(), fresh(2), fresh(2)
    angle = torch.rand(ROOM, D // 4)  # half of the head is turned
    cos, sin = angle.cos(), angle.sin()
    out = version2.flash_attn_with_kvcache(
        q, k, v, k_new, v_new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=LENGTHS, rotary_interleaved=interleaved,
        **options,
    )  # fmt: skip
    turned, keys = [], []
    for b, n in enumerate(LENGTHS.tolist()):
        torch.testing.assert_close(k[b, n : n + 2], rotated(k_new[b], [n, n + 1], cos, sin, interleaved))
        assert torch.equal(v[b, n : n + 2], v_new[b])
        turned.append(rotated(q[b], [n, n + 1] if options else [n, n], cos, sin, interleaved))
        keys.append((k[b, : n + 2], v[b, : n + 2]))
    keep = truth.causal if "causal" in options else truth.window(3, 2) if options else truth.everything
    torch.testing.assert_close(out, expected_of(torch.stack(turned), keys, keep=keep)[0])


@pytest.mark.parametrize(
    ("version", "window", "by_row"),
    [
        (version2, (CAPACITY, CAPACITY), False),
        (version2, (CAPACITY - 1, CAPACITY), True),
        (version2, (-1, CAPACITY - 1), True),
        (version3, (CAPACITY - 1, 1), False),
        (version3, (CAPACITY - 2, 1), True),
        (version3, (-1, 0), True),
    ],
)
@pytest.mark.parametrize("pages", [False, True])
def test_a_window_as_wide_as_the_cache_is_none_for_rotation(version, window, by_row, pages):
    q, (k, v), k_new, v_new = fresh(2, H), caches(), fresh(2), fresh(2)
    angle = torch.rand(ROOM, D // 2)
    rotary = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "cache_seqlens": LENGTHS, "window_size": window}
    if pages:
        k, v = (x.reshape(B * 2, CAPACITY // 2, HKV, D) for x in (k, v))
        table = torch.arange(B * 2, dtype=torch.int32).view(B, 2)
        rotary["block_table" if version is version2 else "page_table"] = table
    out = version.flash_attn_with_kvcache(q, k, v, k_new, v_new, **rotary)
    turned, keys = [], []
    for b, n in enumerate(LENGTHS.tolist()):
        turned.append(rotated(q[b], [n, n + by_row], angle.cos(), angle.sin(), True))
        keys.append(tuple(x.reshape(B, CAPACITY, HKV, D)[b, : n + 2] for x in (k, v)))
    left, right = (2 * CAPACITY if x < 0 else x for x in window)
    torch.testing.assert_close(out, expected_of(torch.stack(turned), keys, keep=truth.window(left, right))[0])


def test_pages():
    q, k_new, v_new = fresh(1, H), fresh(1), fresh(1)
    k, v = torch.randn(10, 4, HKV, D), torch.randn(10, 4, HKV, D)
    table = torch.tensor([[7, 1, 0], [2, 9, 3], [4, 8, 5]], dtype=torch.int32)
    out = version2.flash_attn_with_kvcache(q, k, v, k_new, v_new, cache_seqlens=LENGTHS, block_table=table)
    keys = []
    for b, n in enumerate(LENGTHS.tolist()):
        mine, my_v = (x[table[b].long()].flatten(0, 1) for x in (k, v))
        assert torch.equal(mine[n], k_new[b, 0])
        keys.append((mine[: n + 1], my_v[: n + 1]))
    torch.testing.assert_close(out, expected_of(q, keys)[0])


@pytest.mark.parametrize(
    ("index", "words"),
    [((0, 9), "cache_batch_idx leads to position 9; it must be within the"), ((1,), "must have 2 elements for 2")],
)
def test_a_cache_batch_idx_that_leads_nowhere(index, words):
    cache = torch.randn(4, 8, 2, 16)
    with pytest.raises(wa.AttentionError, match=words):
        version2.flash_attn_with_kvcache(
            torch.randn(2, 1, 4, 16), cache, cache, cache_seqlens=3, cache_batch_idx=torch.tensor(index)
        )


def test_what_combined_parts_are_written_to():
    outs, lses, out = torch.randn(2, 5, H, D), torch.randn(2, 5, H), torch.empty(5, H, D)
    with pytest.raises(wa.AttentionError, match=r"^out requires a gradient; it is overwritten"):
        version3.flash_attn_combine(outs, lses, out=out.requires_grad_())
    with torch.inference_mode():
        out = torch.empty(5, H, D)
    assert torch.equal(version3.flash_attn_combine(outs, lses, out=out)[0], version3.flash_attn_combine(outs, lses)[0])


def test_cache_batch_idx_and_leftpad():
    q, (k, v), k_new, v_new = fresh(2, H), caches(5), fresh(2), fresh(2)
    index, pad = torch.tensor([4, 0, 2], dtype=torch.int32), torch.tensor([2, 0, 7], dtype=torch.int32)
    out = version2.flash_attn_with_kvcache(
        q, k, v, k_new, v_new, cache_seqlens=LENGTHS, cache_batch_idx=index, cache_leftpad=pad, causal=True
    )
    keys = []
    for n, row, first in zip(LENGTHS.tolist(), index.tolist(), pad.tolist(), strict=True):
        assert torch.equal(k[row, n : n + 2], k_new[len(keys)])
        keys.append((k[row, first : n + 2], v[row, first : n + 2]))
    torch.testing.assert_close(out, expected_of(q, keys, keep=truth.causal)[0])


def test_ragged_queries_and_appends_of_version_3():
    cu_q, cu_new = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5, 6], [0, 1, 3, 4]))
    q, k_new, v_new = torch.randn(6, H, D), torch.randn(4, HKV, D), torch.randn(4, HKV, D)
    k, v = torch.randn(10, 4, HKV, D), torch.randn(10, 4, HKV, D)
    table = torch.tensor([[7, 1, 0], [2, 9, 3], [4, 8, 5]], dtype=torch.int32)
    angle = torch.rand(ROOM, D // 2)
    cos, sin = angle.cos(), angle.sin()
    start = torch.tensor([1, 2, 3], dtype=torch.int32)
    out, lse = version3.flash_attn_with_kvcache(
        q, k, v, k_new, v_new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=LENGTHS, page_table=table,
        cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_new, max_seqlen_q=3, rotary_seqlens=start, causal=True,
        attention_chunk=4, rotary_interleaved=False, return_softmax_lse=True,
    )  # fmt: skip
    outs, lses = [], []
    for b, n in enumerate(LENGTHS.tolist()):
        new, mine = slice(cu_new[b], cu_new[b + 1]), slice(cu_q[b], cu_q[b + 1])
        size = int(cu_new[b + 1] - cu_new[b])
        cache_k, cache_v = (x[table[b].long()].flatten(0, 1)[: n + size] for x in (k, v))
        places = [int(start[b]) + i for i in range(4)]
        torch.testing.assert_close(cache_k[n:], rotated(k_new[new], places[:size], cos, sin, False))
        assert torch.equal(cache_v[n:], v_new[new])
        turned = rotated(q[mine], places[: len(q[mine])], cos, sin, False)
        pair = truth.attend(turned, cache_k, cache_v, lambda i, j: (j <= i) & (i // 4 == j // 4))
        outs.append(pair[0])
        lses.append(pair[1])
    torch.testing.assert_close(out, torch.cat(outs))
    torch.testing.assert_close(lse, torch.cat(lses, -1))


@pytest.mark.parametrize("hint", ["num_splits", "scheduler_metadata", "pack_gqa", "sm_margin"])
def test_hints_change_nothing(hint):
    q, (k, v) = fresh(1, H), caches()
    plain = version3.flash_attn_with_kvcache(q, k, v, cache_seqlens=LENGTHS)
    value = torch.zeros(1, dtype=torch.int32) if hint == "scheduler_metadata" else 1
    assert torch.equal(version3.flash_attn_with_kvcache(q, k, v, cache_seqlens=LENGTHS, **{hint: value}), plain)
    if hint == "num_splits":
        assert torch.equal(version2.flash_attn_with_kvcache(q, k, v, cache_seqlens=LENGTHS, num_splits=4), plain)


def test_there_is_no_backward():
    q, (k, v) = fresh(1, H).requires_grad_(), caches()
    assert not version2.flash_attn_with_kvcache(q, k, v, cache_seqlens=LENGTHS).requires_grad


TABLE = torch.zeros(B, 1, dtype=torch.int32)
COS = torch.ones(ROOM, D // 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": "new"}, "one of k and v is None"),
        ({"k": "new", "v": "new", "cache_seqlens": None}, "cache_seqlens is None"),
        ({"rotary_cos": COS}, "one of rotary_cos and rotary_sin is None"),
        ({"rotary_cos": COS, "rotary_sin": COS}, "rotary_cos is given without k"),
        ({"cu_seqlens_k_new": LENGTHS}, "cu_seqlens_k_new is given without k"),
        (
            {"k": "new", "v": "new", "cache_seqlens": LENGTHS + 4},
            r"^the length after appending\[2\] is 13; .* 0 .. 12",
        ),
        (
            {
                "k": "new",
                "v": "new",
                "rotary_cos": COS,
                "rotary_sin": COS,
                "rotary_seqlens": LENGTHS,
                "cache_seqlens": LENGTHS + 4,
            },
            r"^cache_seqlens leads to position 12; .* within the 12 keys",
        ),
        ({"k": "new", "v": "new", "rotary_cos": COS, "rotary_sin": COS[:, :1]}, "^rotary_sin has shape"),
        ({"cache_seqlens": LENGTHS + 6}, r"^cache_seqlens\[2\] is 14; .* 0 .. 12, the keys that the cache holds$"),
        ({"cache_seqlens": LENGTHS - 6}, r"cache_seqlens\[1\] is -6; "),
        ({"qv": torch.zeros(1)}, "^qv has shape"),
        ({"cache_seqlens": 1.5}, "^cache_seqlens is 1.5; it must be a tensor"),
        ({"cache_seqlens": 2**70}, "^cache_seqlens is 1180591620717411303424; it must be a tensor"),
        (
            {"k": torch.zeros(B, 1, HKV, D, dtype=torch.float8_e4m3fn), "v": "new"},
            "^k has dtype torch.float8_e4m3fn; new keys and values have 16 bits",
        ),
    ],
)
def test_what_does_not_go_together_is_named(given, message):
    q, (k, v) = fresh(1, H), caches()
    given = {name: fresh(1) if isinstance(value, str) else value for name, value in given.items()}
    with pytest.raises(wa.AttentionError, match=message):
        version3.flash_attn_with_kvcache(q, k, v, **{"cache_seqlens": LENGTHS, **given})


def test_positions_outside_of_the_rotary_table_are_named():
    q, (k, v), new = fresh(1, H), caches(), fresh(1)
    short = torch.ones(8, D // 2)
    with pytest.raises(wa.AttentionError, match=r"^rotary_cos has 8 rows; position 8 of sequence 2"):
        version2.flash_attn_with_kvcache(q, k, v, new, new, short, short, cache_seqlens=LENGTHS)
    with pytest.raises(wa.AttentionError, match=r"^positions\[2\] is 9; .* 0 .. 7, the rows of rotary_cos"):
        version3.flash_attn_with_kvcache(
            q, k, v, new, new, None, short, short, cache_seqlens=LENGTHS, rotary_seqlens=LENGTHS + 1
        )
