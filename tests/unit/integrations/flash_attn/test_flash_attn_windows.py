"""flash-attn's windows: what no limit is, negative sides, chunks; the versions differ in it."""

import functools
import sys

import numpy as np
import pytest
import torch

import warpattn as wa
from warpattn.integrations.flash_attn import version2, version3, version4


def band(rows: int, keys: int, left: int | None, right: int | None) -> torch.Tensor:
    """(1, rows, keys): the keys from q - left to q + right, aligned to the bottom right."""
    q = torch.arange(rows)[:, None] + keys - rows
    k = torch.arange(keys)
    return ((left is None or k >= q - left) & torch.as_tensor(right is None or k <= q + right).expand(rows, keys))[None]


WINDOWS = [(8, -3), (-3, 8), (None, -5), (-5, None), (None, -1), (-1, None), (3, 2), (None, 0), (0, 0), (-4, 4)]


@pytest.mark.parametrize("backend", ["auto", "simulate:sm90"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_version_4_takes_negative_sides_for_offsets(backend, window, monkeypatch):
    monkeypatch.setattr(version4, "attention", functools.partial(wa.attention, backend=backend))
    q, k, v = (torch.randn(1, n, 2, 16).half() for n in (20, 30, 30))
    out, _ = version4.flash_attn_func(q, k, v, window_size=window)
    expected = wa.attention(q, k, v, mask=wa.Materialized(band(20, 30, *window)))
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-3, 2), (2, -3), (-2, 0)], ids=str)
def test_version_4_has_no_window_where_a_pair_leaves_no_key(causal, window):
    q = torch.randn(1, 20, 2, 16)
    left, right = window[0], 0 if causal else window[1]
    limits = (None, 0 if causal else None) if left + right < 0 else (left, right)
    out, _ = version4.flash_attn_func(q, q, q, window_size=window, causal=causal)
    torch.testing.assert_close(out, wa.attention(q, q, q, mask=wa.Materialized(band(20, 20, *limits))))


@pytest.mark.parametrize("make", [torch.tensor, np.array, lambda pair: tuple(map(np.int64, pair)),
                                  lambda pair: tuple(map(torch.tensor, pair)), list], ids=range(5))  # fmt: skip
def test_windows_of_any_kind_of_number(make):
    q = torch.randn(1, 20, 2, 16)
    for flash, pair in ((version2.flash_attn_func, (3, -1)), (version3.flash_attn_func, (3, 2))):
        assert torch.equal(flash(q, q, q, window_size=make(pair)), flash(q, q, q, window_size=pair))
    found, wanted = (version4.flash_attn_func(q, q, q, window_size=x)[0] for x in (make((8, -3)), (8, -3)))
    assert torch.equal(found, wanted)
    assert torch.equal(version2.flash_attn_func(q, q, q, window_size=(sys.maxsize, 0), softcap=torch.tensor(2.0)),
                       version2.flash_attn_func(q, q, q, causal=True, softcap=2.0))  # fmt: skip


@pytest.mark.parametrize("window", [(1,), (1, 2, 3), (1.5, 0), "12", None, (True, 1), torch.ones(2), np.ones((2, 2))])
def test_windows_that_are_none(window):
    q = torch.randn(1, 4, 2, 16)
    for flash in (version2.flash_attn_func, version3.flash_attn_func, version4.flash_attn_func):
        with pytest.raises(wa.AttentionError, match=r"window_size is .* must be a pair of ints"):
            flash(q, q, q, window_size=window)


def test_chunks_are_counted_from_the_first_key():
    q, cache = torch.randn(2, 3, 2, 16), torch.randn(2, 12, 2, 16)
    lengths, first = (torch.tensor(x, dtype=torch.int32) for x in ([12, 9], [2, 5]))
    out = version3.flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=lengths, cache_leftpad=first, causal=True, attention_chunk=4
    )
    for b, (length, start) in enumerate(zip(lengths.tolist(), first.tolist(), strict=True)):
        keys = cache[b : b + 1, start:length]
        torch.testing.assert_close(
            out[b : b + 1], version3.flash_attn_func(q[b : b + 1], keys, keys, causal=True, attention_chunk=4)
        )
