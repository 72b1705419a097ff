"""The transformers adapter's two functions: masks stay masks and show what transformers shows; nothing is ignored."""

from dataclasses import dataclass

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.23")  # whose mask functions these are

from transformers.masking_utils import (  # noqa: E402
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import warpattn as wa  # noqa: E402
from warpattn.errors import AttentionError  # noqa: E402
from warpattn.integrations import transformers as adapter  # noqa: E402
from warpattn.integrations.transformers.attend import _as_mask  # noqa: E402
from warpattn.integrations.transformers.masks import ForwardMask, RealTokens, padding_mask  # noqa: E402
from warpattn.masks import Causal, Document, Full, Mask, Materialized, Padding, SlidingWindow  # noqa: E402
from warpattn.reference import reference  # noqa: E402

KEYS = 9
RIGHT = torch.arange(KEYS) < torch.tensor([[KEYS], [4]])
LEFT = RIGHT.flip(1)
HOLES = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 0]], dtype=torch.bool)
PADDINGS = {"none": None, "right": RIGHT, "left": LEFT, "holes": HOLES, "all": torch.ones(2, KEYS, dtype=torch.bool)}
FUNCTIONS = {
    "causal": causal_mask_function,
    "bidirectional": bidirectional_mask_function,
    "window": sliding_window_causal_mask_function(3),
    "two-sided window": sliding_window_bidirectional_mask_function(2),
    "chunked": chunked_causal_mask_function(4, torch.tensor([0, 5])),
}


def kept(mask, queries, keys):
    """Whether each of two sequences' queries sees each key."""
    pictures = [mask.picture(queries, keys, b=b).text.splitlines() for b in range(2)]
    return torch.tensor([[[cell == "■" for cell in row] for row in rows] for rows in pictures])


def theirs(queries, keys, **options):
    sizes = {"batch_size": 2, "q_length": queries, "kv_length": keys}
    return sdpa_mask(**sizes, allow_is_causal_skip=False, **options)[:, 0].expand(2, -1, -1)


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("queries", [KEYS, 2, 1])
def test_a_dynamic_cache(function, padding, queries):
    options = {"q_offset": KEYS - queries, "mask_function": function, "attention_mask": padding}
    mask = adapter.build_mask(2, queries, KEYS, **options)
    assert not isinstance(mask.mask, Materialized)
    assert torch.equal(kept(mask, queries, KEYS), theirs(queries, KEYS, **options))


@pytest.mark.parametrize("offset", [4, torch.tensor(4), torch.tensor([4])], ids=["int", "scalar", "tensor"])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("padding", [None, LEFT[:, :6]], ids=["none", "left"])
def test_a_static_cache_has_room_after_the_rows(function, padding, offset):
    """Two queries at 4 and 5 of a cache with 9 slots."""
    if padding is not None:
        padding = padding.clone()
        padding[:, -2:] = True
    options = {"q_offset": offset, "mask_function": function, "attention_mask": padding}
    mask = adapter.build_mask(2, 2, KEYS, **options)
    assert not isinstance(mask.mask, Materialized)
    assert torch.equal(kept(mask, 2, KEYS), theirs(2, KEYS, **options))


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_sliding_cache_begins_later(function):
    """Two queries at 12 and 13; the keys at hand are those from 5 on."""
    seen = torch.arange(14) >= torch.tensor([[0], [7]])
    options = {"q_offset": 12, "kv_offset": 5, "mask_function": function, "attention_mask": seen}
    mask = adapter.build_mask(2, 2, KEYS, **options)
    assert torch.equal(kept(mask, 2, KEYS), theirs(2, KEYS, **options))


@pytest.mark.parametrize("function", list(FUNCTIONS.values())[:4], ids=list(FUNCTIONS)[:4])
def test_packed_sequences_are_documents(function):
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1, 2]])
    ids = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    remapped = remap_positions_for_packed_sequence(function, positions)
    packed = and_masks(packed_sequence_mask_function(ids), remapped)
    mask = adapter.build_mask(2, KEYS, KEYS, mask_function=packed)
    assert not isinstance(mask.mask, Materialized)
    assert torch.equal(kept(mask, KEYS, KEYS), theirs(KEYS, KEYS, mask_function=packed))


def test_a_window_and_causality_are_one_mask():
    assert adapter.build_mask(2, KEYS, KEYS, mask_function=FUNCTIONS["window"]).mask == SlidingWindow(3)
    assert adapter.build_mask(2, KEYS, KEYS, mask_function=FUNCTIONS["bidirectional"]).mask == Full()


def test_a_mask_that_comes_back_is_passed_on():
    mask = adapter.build_mask(2, KEYS, KEYS)
    assert isinstance(mask, ForwardMask)
    assert adapter.build_mask(2, KEYS, KEYS, attention_mask=mask.contiguous()) is mask
    assert mask.ndim == 4


def test_padding_reads_no_tensor_where_it_can():
    assert padding_mask(PADDINGS["all"]) == Full()
    assert isinstance(padding_mask(RIGHT), Padding)
    assert isinstance(padding_mask(LEFT), RealTokens)


@pytest.mark.parametrize("real", [RIGHT, LEFT, HOLES, torch.zeros(2, KEYS, dtype=torch.bool)])
def test_the_span_of_real_tokens_is_tight(real):
    span = RealTokens(real)
    first, last, full = span._bounds.T.tolist()
    for b, row in enumerate(real.tolist()):
        seen = [k for k, token in enumerate(row) if token]
        assert (first[b], last[b]) == ((seen[0], seen[-1] + 1) if seen else (KEYS, 0))
        assert full[b] == (last[b] if all(row[first[b] : last[b]]) and seen else first[b])
    out, lse = reference(*(torch.randn(2, KEYS, 1, 8) for _ in range(3)), mask=span)
    assert torch.equal(torch.isneginf(lse), ~real.any(1)[:, None, None].expand(2, 1, KEYS))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    "function",
    [
        and_masks(causal_mask_function, lambda b, h, q, k: (q + k) % 2 == 0),
        or_masks(causal_mask_function, FUNCTIONS["two-sided window"]),
    ],
    ids=["a function of the model's own", "or"],
)
def test_what_has_no_formula_is_materialized(function):
    mask = adapter.build_mask(2, 5, KEYS, q_offset=4, mask_function=function, attention_mask=LEFT)
    assert isinstance(mask.mask, Materialized)
    assert torch.equal(kept(mask, 5, KEYS), theirs(5, KEYS, q_offset=4, mask_function=function, attention_mask=LEFT))


def test_no_mask_means_what_the_module_and_the_options_say():
    module = torch.nn.Module()
    assert _as_mask(module, None, {}) == Causal()
    assert _as_mask(module, None, {"sliding_window": 4}) == SlidingWindow(4)
    module.is_causal = False
    assert _as_mask(module, None, {}) == Full()
    assert _as_mask(module, None, {"sliding_window": 4}) == SlidingWindow(5, right=4)
    assert _as_mask(module, None, {"is_causal": True}) == Causal()


def inputs(batch=1, length=KEYS):
    return (torch.randn(batch, heads, length, 8) for heads in (4, 2, 2))


@pytest.mark.parametrize(
    "option",
    [{"dropout": 0.1}, {"output_attentions": True}, {"head_mask": torch.ones(4)}, {"cache": object()}],
    ids=lambda option: next(iter(option)),
)
def test_what_would_change_the_result_is_refused(option):
    with pytest.raises(AttentionError, match=next(iter(option))):
        adapter.attend(torch.nn.Module(), *inputs(), None, **option)


def test_options_that_change_nothing_are_taken():
    q, k, v = inputs()
    plain, weights = adapter.attend(torch.nn.Module(), q, k, v, None)
    same, _ = adapter.attend(torch.nn.Module(), q, k, v, None, dropout=0.0, output_attentions=False, use_cache=True)
    assert weights is None
    assert torch.equal(plain, same)


def test_the_dtype_of_an_autocast_region():
    """Rotation leaves queries and keys in fp32, projections give values in bf16."""
    q, k, v = (torch.randn(1, 2, KEYS, 8) for _ in range(3))
    halves = [x.bfloat16() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = adapter.attend(torch.nn.Module(), q, k, halves[2], None)
    assert torch.equal(found, adapter.attend(torch.nn.Module(), *halves, None)[0])


def test_softcap_bias_and_sinks():
    q, k, v = (3 * x for x in inputs())
    bias, sinks = torch.randn(1, 4, KEYS, KEYS), torch.randn(4)
    out, _ = adapter.attend(
        torch.nn.Module(), q, k, v, None, scaling=0.5, softcap=2.0, position_bias=bias, s_aux=sinks.bfloat16()
    )
    scores = 2.0 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 0.5 / 2.0) + bias
    scores = scores.masked_fill(~torch.ones(KEYS, KEYS, dtype=torch.bool).tril(), -torch.inf)
    scores = torch.cat((scores, sinks.bfloat16().float()[None, :, None, None].expand(1, 4, KEYS, 1)), -1)
    expected = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize(
    "mask", [Causal(), SlidingWindow(2), Full(), Document(torch.tensor([[0] * 4 + [1] * 5])) & Causal()]
)
def test_offsets_of_packed_sequences_run_each_by_itself(mask):
    q, k, v = inputs()
    offsets = torch.tensor([0, 4, KEYS])
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 5, "max_length_k": 5}
    out, _ = adapter.attend(torch.nn.Module(), q, k, v, mask, **packed)
    inner = Causal() if isinstance(mask, wa.masks.And) else mask
    for rows in (slice(0, 4), slice(4, KEYS)):
        alone, _ = adapter.attend(torch.nn.Module(), q[:, :, rows], k[:, :, rows], v[:, :, rows], inner)
        torch.testing.assert_close(out[:, rows], alone)


def test_packed_sequences_take_one_row_and_no_padding():
    offsets = torch.tensor([0, 4, KEYS], dtype=torch.int32)
    with pytest.raises(AttentionError, match="batch is 2"):
        adapter.attend(torch.nn.Module(), *inputs(2), None, cu_seq_lens_q=offsets)
    with pytest.raises(AttentionError, match="has a RealTokens"):
        adapter.attend(torch.nn.Module(), *inputs(), RealTokens(LEFT[1:]) & Causal(), cu_seq_lens_q=offsets)


def test_a_mask_that_is_defined_after_the_operator_was_imported_compiles():
    from warpattn.runtime.torch_op import tracing  # noqa: F401

    @dataclass(frozen=True, eq=False)
    class Late(Mask):
        real: torch.Tensor

        def keep(self, b, h, q, k, lens=None):
            return wa.load(self.real, b, k)

    def attend(x, real):
        return wa.attention(x, x, x, mask=Late(real) & Causal())

    x = torch.randn(2, KEYS, 2, 8)
    with torch.inference_mode():
        compiled = torch.compile(attend, backend="eager", fullgraph=True)(x, HOLES)
        torch.testing.assert_close(compiled, attend(x, HOLES))


@pytest.mark.parametrize(
    "misuse",
    [
        lambda mask: mask.dtype,
        lambda mask: mask[:, :, :, :4],
        lambda mask: torch.zeros(()) + mask,
        lambda mask: 1 - mask,
    ],
)
def test_a_model_that_takes_the_mask_for_a_tensor_is_told_so(misuse):
    with pytest.raises(AttentionError, match=r"^the mask.*; this model makes its own attention of it: use attn_impl"):
        misuse(adapter.build_mask(2, KEYS, KEYS))
