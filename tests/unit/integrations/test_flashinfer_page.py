"""FlashInfer's functions that append to a paged cache, against writes of single rows, and merges of many states."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import warpattn.integrations.flashinfer as flashinfer
from warpattn.errors import AttentionError

PAGE, HEADS, DIM = 4, 2, 16
LENGTHS, NEW = (9, 3, 0, 8), (2, 3, 0, 5)  # keys of each request, the last of which are new
PAGES = ((5, 1, 7), (0,), (), (3, 6))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


INDPTR, INDICES = ints(0, 3, 4, 4, 6), ints(*(page for pages in PAGES for page in pages))
LAST, APPEND = ints(1, 3, 0, 4), ints(0, 2, 5, 5, 10)
LISTS = (INDICES, INDPTR, LAST)


def rows() -> list[tuple[int, int]]:
    """The page and row of each new token."""
    places = ((b, n) for b, (most, new) in enumerate(zip(LENGTHS, NEW, strict=True)) for n in range(most - new, most))
    return [(PAGES[b][n // PAGE], n % PAGE) for b, n in places]


def places(nnz: int = sum(NEW)) -> tuple[Tensor, Tensor]:
    return flashinfer.get_batch_indices_positions(APPEND, flashinfer.get_seq_lens(INDPTR, LAST, PAGE), nnz)


def test_requests_and_positions_of_new_tokens():
    assert flashinfer.get_seq_lens(INDPTR, LAST, PAGE).tolist() == list(LENGTHS)
    request, position = places(12)
    assert request.dtype == position.dtype == torch.int32
    assert request.tolist() == [0, 0, 1, 1, 1, 3, 3, 3, 3, 3, -1, -1]
    assert position.tolist() == [7, 8, 0, 1, 2, 3, 4, 5, 6, 7, -1, -1]
    for x in flashinfer.get_batch_indices_positions(ints(0), ints(), 2):
        assert x.tolist() == [-1, -1]


@pytest.mark.parametrize("tokens", [sum(NEW), sum(NEW) + 3], ids=["all", "padded"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("together", [True, False])
def test_new_keys_and_values_are_written_at_their_places(layout: str, together: bool, tokens: int):
    size = (PAGE, HEADS) if layout == "NHD" else (HEADS, PAGE)
    cache = torch.full((8, 2, *size, DIM), 7.0, dtype=torch.bfloat16)
    key, value = torch.randn(2, tokens, HEADS, DIM).bfloat16()
    expected = cache.clone()
    for side, x in enumerate((key, value)):
        pages = expected[:, side] if layout == "NHD" else expected[:, side].transpose(1, 2)
        for token, place in enumerate(rows()):
            pages[place] = x[token]
    given = cache if together else (cache[:, 0], cache[:, 1])
    flashinfer.append_paged_kv_cache(key, value, *places(tokens), given, *LISTS, layout)
    assert torch.equal(cache, expected)


def test_new_latents_are_written_at_their_places():
    latents, rotary = torch.zeros(8, PAGE, 512), torch.zeros(8, PAGE, 64)
    new, new_rotary = torch.randn(sum(NEW), 512), torch.randn(sum(NEW), 64)
    flashinfer.append_paged_mla_kv_cache(new, new_rotary, *places(), latents, rotary, *LISTS)
    for token, place in enumerate(rows()):
        assert torch.equal(latents[place], new[token]) and torch.equal(rotary[place], new_rotary[token])
    assert int((latents != 0).any(-1).sum()) == sum(NEW)


@pytest.mark.parametrize("count", [16, 17, 300])
def test_any_number_of_states_is_merged(count: int):
    v, s = torch.randn(5, count, HEADS, DIM).bfloat16(), torch.randn(5, count, HEADS) * 3
    out, lse = flashinfer.merge_states(v, s)
    weights = (s.double() * math.log(2)).softmax(1)
    expected = (v.double() * weights[..., None]).sum(1)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=2**-8, rtol=2**-8)  # rounded once
    torch.testing.assert_close(lse, ((s.double() * math.log(2)).logsumexp(1) / math.log(2)).float())


def test_wrong_lists_are_one_sentence():
    x, cache = torch.zeros(3, HEADS, DIM), torch.zeros(8, 2, PAGE, HEADS, DIM)
    for rule, call in {
        "kv_indptr lists 4 requests; kv_last_page_len has 1": lambda: flashinfer.get_seq_lens(INDPTR, ints(1), PAGE),
        "append_indptr lists 4 requests; seq_lens has 1": lambda: flashinfer.get_batch_indices_positions(
            APPEND, ints(1), 3
        ),
        "there are 3 new tokens; batch_indices has 10 and positions 10": lambda: flashinfer.append_paged_kv_cache(
            x, x, *places(), cache, *LISTS
        ),
        "kv_layout is 'DHN'": lambda: flashinfer.append_paged_kv_cache(x, x, *places(3), cache, *LISTS, "DHN"),
        "append_value has": lambda: flashinfer.append_paged_kv_cache(x, x[:, :1], *places(3), cache, *LISTS),
    }.items():
        with pytest.raises(AttentionError) as error:
            call()
        assert rule in str(error.value)
