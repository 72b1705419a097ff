"""8-bit keys and values: what they mean, how they are made, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import warpattn as wa
from tests.oracle import Inputs, plain
from warpattn.kernels.quantise.config import QuantiseConfig, programs_of_head
from warpattn.problem import Call, validate
from warpattn.quantized import EIGHT_BIT, GRANULARITIES
from warpattn.runtime.torch_op.program import read, sequence_of, write
from warpattn.sequences import Dense, PagedRagged

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEADS, HEADS_KV, DIM = 4, 2, 128


def made(*shape: int, seed: int = 0) -> Tensor:
    """Values of very different sizes from head to head and from token to token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.rand((*shape[:-1], 1), generator=generator).mul(8).exp2()


def paged(k: Tensor | wa.Quantized, v: Tensor | wa.Quantized, lengths: tuple[int, ...]) -> wa.PagedKV:
    """Keys and values of (pages, page size, heads, dim) as a cache whose sequences have two pages each."""
    (k, k_scale), (v, v_scale) = [(x.values, x.scale) if isinstance(x, wa.Quantized) else (x, None) for x in (k, v)]
    table = torch.arange(2 * len(lengths)).flip(0).reshape(-1, 2).int()
    return wa.PagedKV(k, v, table, torch.tensor(lengths, dtype=torch.int32), k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
@pytest.mark.parametrize("per", GRANULARITIES)
def test_they_are_values_times_scales(per, dtype):
    """Dense, ragged, over pages and ragged over pages: as fp64 on what was stored."""
    q, stored = made(4, 5, HEADS, DIM).double(), [made(8, 6, HEADS_KV, DIM, seed=seed) for seed in (1, 2)]
    k, v = (wa.quantize(x, dtype, per=per) for x in stored)
    wide = [(x.values.float() * spread(x)).double() for x in (k, v)]
    cache, lengths = paged(k, v, (12, 7, 0, 11)), (12, 7, 0, 11)
    expected = plain(Inputs(q, q, q, paged(*wide, lengths), wa.Causal()), torch.float64)
    torch.testing.assert_close(wa.attention_paged(q, cache, mask=wa.Causal(), return_lse=True), expected)
    queries = wa.Ragged(torch.tensor([0, 5, 10, 10, 15], dtype=torch.int32))
    rows = q.flatten(0, 1)[:15]
    expected = plain(Inputs(rows, q, q, PagedRagged(paged(*wide, lengths), queries), wa.Causal()), torch.float64)
    torch.testing.assert_close(wa.attention_paged(rows, cache, queries, mask=wa.Causal(), return_lse=True), expected)
    q = made(8, 3, HEADS, DIM).double()
    expected = plain(Inputs(q, *wide), torch.float64)
    torch.testing.assert_close(wa.attention(q, k, v, return_lse=True), expected)
    flat = [
        wa.Quantized(x.values.flatten(0, 1), x.scale.flatten(0, 1) if x.scale.ndim > 1 else x.scale) for x in (k, v)
    ]
    seq = wa.Ragged(torch.tensor([0, 10, 24], dtype=torch.int32), torch.tensor([0, 20, 48], dtype=torch.int32))
    rows = q.flatten(0, 1)
    expected = plain(Inputs(rows, *(x.flatten(0, 1) for x in wide), seq), torch.float64)
    torch.testing.assert_close(wa.attention_varlen(rows, *flat, seq, return_lse=True), expected)


def spread(x: wa.Quantized) -> Tensor:
    """The scale of every element."""
    shape, scale = x.values.shape, x.scale
    if scale.ndim < 2:
        return (scale[:, None] if scale.ndim else scale).expand(shape)
    scale = scale if scale.ndim == len(shape) else scale[..., None]
    return torch.cat([scale[..., i : i + 1].expand(*shape[:-1], shape[-1] // scale.shape[-1])
                      for i in range(scale.shape[-1])], -1)  # fmt: skip


@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
@pytest.mark.parametrize("per", GRANULARITIES)
def test_quantize_uses_the_whole_range(per, dtype):
    x = made(3, 5, HEADS_KV, DIM)
    found = wa.quantize(x.bfloat16(), dtype, per=per)
    x = x.bfloat16().float()
    info, half = torch.finfo(dtype), 2.0**-4 if dtype in (E4M3, torch.float8_e4m3fnuz) else 2.0**-3
    assert found.values.float().abs().max() == info.max
    step = torch.maximum(x.abs() * half, info.smallest_normal * half * spread(found))
    assert ((found.dequantized() - x).abs() <= 1.001 * step).all()
    shapes = {"tensor": (), "head": (2,), "token": (3, 5, 2), 64: (3, 5, 2, 2), 128: (3, 5, 2, 1)}
    assert found.scale.shape == shapes[per] and found.scale.dtype == torch.float32


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (40, 1), (128, 1), (129, 2), (300, 3), (0, 0)])
def test_blocks_of_rows_have_a_scale(tokens, blocks):
    """Each head of 128 tokens, the last of fewer: as if each token had the scale of its block."""
    x = made(2, tokens, HEADS_KV, 64)
    found = wa.quantize(x, per="128 rows")
    assert found.scale.shape == (2, blocks, HEADS_KV)
    of_tokens = found.scale.repeat_interleave(128, 1)[:, :tokens].contiguous()
    assert torch.equal(found.dequantized(), wa.Quantized(found.values, of_tokens).dequantized())
    again = wa.quantize(x, scale=of_tokens)
    assert torch.equal(found.values.view(torch.uint8), again.values.view(torch.uint8))
    for block in range(blocks):
        rows = slice(128 * block, 128 * block + 128)
        torch.testing.assert_close(found.scale[:, block], x[:, rows].abs().amax((1, 3)) / torch.finfo(E4M3).max)
    if tokens > 0:
        per_block = wa.attention(found, found, wa.quantize(x), return_lse=True)
        per_token = wa.attention(*[wa.Quantized(found.values, of_tokens)] * 2, wa.quantize(x), return_lse=True)
        assert all(torch.equal(one, other) for one, other in zip(per_block, per_token, strict=True))


def test_where_blocks_of_rows_have_none():
    q = wa.quantize(made(1, 200, 2, 64), per="64 rows")
    plain_one = wa.quantize(made(1, 200, 2, 64))
    seq, of_ragged = wa.Ragged(torch.tensor([0, 200], dtype=torch.int32)), wa.Quantized(q.values[0], q.scale[0])
    pages = wa.PagedKV(q.values, q.values, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([70]), k_scale=q.scale)
    for message, call in (
        (r"v\.scale has shape \(1, 4, 2\)", lambda: wa.attention(q, q, q)),
        (r"kv\.k_scale has shape \(1, 4, 2\)", lambda: wa.attention_paged(made(1, 1, 2, 64), pages)),
        (r"q\.scale has shape \(4, 2\)", lambda: wa.attention_varlen(of_ragged, of_ragged, of_ragged, seq)),
        ("scales of k per 64 rows, which fp16 operands cannot hold, the sm100 backend takes",
         lambda: wa.attention(q.dequantized().half(), q, plain_one, backend="simulate:sm100")),
        ("per=64 rows needs", lambda: wa.quantize(made(200, 2, 64), per="64 rows")),
    ):  # fmt: skip
        with pytest.raises(wa.AttentionError, match=message):
            call()


@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
def test_conversion_saturates_and_makes_no_nan(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([[[3e38, -3e38, 1e5, -1e5, 0.0, 1e-45, largest * 1.01, float("inf")]]])
    one = torch.tensor(1.0)
    assert wa.quantize(x, dtype, scale=one).values.float()[0, 0].tolist() == [
        largest, -largest, largest, -largest, 0.0, 0.0, largest, largest,
    ]  # fmt: skip
    assert wa.quantize(torch.tensor([[[float("nan"), 1.0]]]), dtype).values.float().isnan().tolist() == [
        [[True, False]]
    ]
    for value in (0.0, 1e-45, 3e38, float("inf")):
        found = wa.quantize(torch.full((2, 1, 8), value), dtype)
        assert found.values.float().isfinite().all() and found.scale.isfinite() and found.scale > 0
    assert wa.quantize(torch.empty(0, 2, 64), dtype, per="head").scale.tolist() == [1, 1]


def test_without_a_scale_values_mean_themselves():
    q, x = made(1, 2, HEADS, DIM), made(1, 9, HEADS_KV, DIM).clamp(-448, 448).to(E4M3)  # torch 2.11 makes NaN of more
    assert torch.equal(wa.attention(q, x, x), wa.attention(q, x.float(), x.float()))
    cache, lengths = (x.float().reshape(3, 3, HEADS_KV, DIM), torch.tensor([9], dtype=torch.int32))
    table = torch.arange(3, dtype=torch.int32)[None]
    one = wa.PagedKV(cache.to(E4M3), cache.to(E4M3), table, lengths, v_scale=torch.tensor(2.0))
    found = wa.attention_paged(q, one)
    torch.testing.assert_close(found, 2 * wa.attention(q, x.float(), x.float()))


def test_plans_take_them():
    """With the scales of each step, and one tensor for both."""
    q, pages = made(2, 1, HEADS, DIM), made(4, 6, HEADS_KV, DIM)
    cache = wa.quantize(pages, per="head")
    kv = wa.PagedKV(cache.values, cache.values, torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
                    torch.tensor([9, 4], dtype=torch.int32), k_scale=cache.scale, v_scale=cache.scale)  # fmt: skip
    plan = wa.DecodePlan(q, kv)
    assert torch.equal(plan(q, kv), wa.attention_paged(q, kv))
    seq = wa.Ragged(torch.tensor([0, 1, 2], dtype=torch.int32))
    assert torch.equal(wa.StepPlan(q[:, 0], kv, seq)(q[:, 0], kv, seq), wa.attention_paged(q[:, 0], kv, seq))
    with pytest.raises(wa.AttentionError, match=r"kv\.k_scale has shape"):
        plan(q, replace(kv, k_scale=torch.ones(())))
    dense = wa.quantize(pages[:2], per="token")
    plan = wa.DecodePlan(q, (dense, dense))
    assert torch.equal(plan(q, (dense, dense)), wa.attention(q, dense, dense))


@pytest.mark.parametrize("per", ["head", "token", 64])
@pytest.mark.parametrize("narrow", [False, True])
def test_prefill_plans_take_them(per, narrow):
    """As `Quantized` and as a batch's own scales, and fewer rows of them."""
    x, rows = made(7, HEADS_KV, DIM), made(7, HEADS, DIM)
    q = wa.quantize(rows, per="token") if narrow else rows
    k, v, seq = wa.quantize(x, per=per), wa.quantize(x.flip(0), per=per), ragged_of(0, 3, 7)
    plan, own = wa.PrefillPlan(q, k, v, seq), replace(seq, k_scale=k.scale, v_scale=v.scale)
    wanted = wa.attention_varlen(q, k, v, seq)
    assert torch.equal(plan(q, k, v, seq), wanted) and torch.equal(plan(q, k.values, v.values, own), wanted)
    few, (of_q, of_k, of_v) = ragged_of(0, 2, 4), (first(each, 4) for each in (q, k, v))
    assert torch.equal(plan(of_q, of_k, of_v, few), wa.attention_varlen(of_q, of_k, of_v, few))


def ragged_of(*offsets: int) -> wa.Ragged:
    return wa.Ragged(torch.tensor(offsets, dtype=torch.int32))


def first(x: Tensor | wa.Quantized, rows: int) -> Tensor | wa.Quantized:
    """The first rows, with their scales."""
    if isinstance(x, Tensor):
        return x[:rows]
    return wa.Quantized(x.values[:rows], x.scale if x.scale.ndim < 2 else x.scale[:rows])


@pytest.mark.parametrize("kept", ["q", "k", "v"])
def test_a_ragged_batch_keeps_its_own_scales(kept):
    """Those of operands that are no `Quantized`, beside others that are."""
    x = {name: wa.quantize(made(7, heads, DIM), per="head") for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    seq = ragged_of(0, 3, 7)
    plain = x | {kept: x[kept].values}
    found = wa.attention_varlen(**plain, seq=replace(seq, **{f"{kept}_scale": x[kept].scale}))
    assert torch.equal(found, wa.attention_varlen(**x, seq=seq))
    with pytest.raises(wa.AttentionError, match=rf"^seq\.{kept}_scale is given; a Quantized or a LatentQuery of the"):
        wa.attention_varlen(**x, seq=replace(seq, **{f"{kept}_scale": torch.ones(())}))


def test_queries_over_pages_have_one_scale():
    q, pages = wa.quantize(made(2, 1, HEADS, DIM)), wa.quantize(made(4, 6, HEADS_KV, DIM)).values
    kv = replace(paged(pages, pages, (9, 4)), q_scale=torch.ones(()))
    seq = ragged_of(0, 1, 2)
    few = wa.Quantized(q.values[:, 0], q.scale)
    calls = (lambda: wa.attention_paged(q, kv), lambda: wa.DecodePlan(q, kv), lambda: wa.StepPlan(few, kv, seq))
    for call in calls:
        with pytest.raises(wa.AttentionError, match=r"^kv\.q_scale is given; a Quantized or a LatentQuery of the call"):
            call()
    plan = wa.StepPlan(few, replace(kv, q_scale=None), seq)
    plan.update(seq.cu_q, kv.lengths, kv.block_table)
    assert torch.equal(plan(few, plan.kv, plan.seq), wa.attention_paged(few, replace(kv, q_scale=None), seq))


@pytest.mark.parametrize("dtype", EIGHT_BIT, ids=str)
def test_queries_of_8_bits(dtype):
    """Dense and ragged: as fp64 on what was stored, in the dtype of `out`, bf16 without one."""
    q, k, v = (wa.quantize(made(2, 5, heads, DIM, seed=heads), dtype, per=per)
               for heads, per in ((HEADS, "head"), (HEADS_KV, "token"), (HEADS_KV, "tensor")))  # fmt: skip
    wide = [x.dequantized() for x in (q, k, v)]
    expected, lse = (x.float() for x in plain(Inputs(*wide), torch.float64))
    out = torch.empty_like(expected)
    assert wa.attention(q, k, v, out=out) is out
    torch.testing.assert_close(out, expected)
    found, found_lse = wa.attention(q, k, v, return_lse=True)
    assert found.dtype == torch.bfloat16 and torch.equal(found, out.bfloat16())
    torch.testing.assert_close(found_lse, lse)
    seq = wa.Ragged(torch.tensor([0, 5, 10], dtype=torch.int32))
    flat = [wa.Quantized(x.values.flatten(0, 1), x.scale.flatten(0, 1) if x.scale.ndim > 1 else x.scale)
            for x in (q, k, v)]  # fmt: skip
    assert torch.equal(wa.attention_varlen(*flat, seq), found.flatten(0, 1))
    compiled = torch.compile(lambda *x: wa.attention(*x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*(x.values for x in (q, k, v))), wa.attention(*(x.values for x in (q, k, v))))


@pytest.mark.parametrize("ragged", [False, True], ids=["batch", "ragged"])
def test_queries_of_8_bits_over_pages(ragged):
    """Their scale comes with them, or with the cache; calls and plans."""
    q = wa.quantize(made(4, HEADS, DIM), per="token")
    q = q if ragged else wa.Quantized(q.values.unflatten(0, (2, 2)), q.scale.unflatten(0, (2, 2)))
    cache = wa.quantize(made(4, 6, HEADS_KV, DIM), per="head")
    kv = wa.PagedKV(cache.values, cache.values, torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
                    torch.tensor([9, 4], dtype=torch.int32), k_scale=cache.scale, v_scale=cache.scale)  # fmt: skip
    seq = (wa.Ragged(torch.tensor([0, 1, 4], dtype=torch.int32)),) if ragged else ()
    wide = replace(kv, k_pages=cache.dequantized(), v_pages=cache.dequantized(), k_scale=None, v_scale=None)
    expected = wa.attention_paged(q.dequantized(), wide, *seq, mask=wa.Causal())
    found = wa.attention_paged(q, kv, *seq, mask=wa.Causal(), out=torch.empty_like(expected))
    torch.testing.assert_close(found, expected)
    scaled = replace(kv, q_scale=q.scale)
    assert torch.equal(wa.attention_paged(q.values, scaled, *seq, mask=wa.Causal()), found.bfloat16())
    plan = (wa.StepPlan if ragged else wa.DecodePlan)(q, kv, *seq, mask=wa.Causal())
    for step in ((q, kv), (q.values, scaled)):
        assert torch.equal(plan(*step, *seq), found.bfloat16())
    if ragged:
        few, one = wa.Quantized(q.values[:3], q.scale[:3]), wa.Ragged(torch.tensor([0, 1, 3], dtype=torch.int32))
        assert torch.equal(plan(few, kv, one), wa.attention_paged(few, kv, one, mask=wa.Causal()))
        with pytest.raises(wa.AttentionError, match=r"over pages scales belong to kv\.q_scale"):
            wa.attention_paged(q.values, kv, replace(*seq, q_scale=q.scale))
    with pytest.raises(wa.AttentionError, match=r"q\.scale has shape \(3,\)"):
        wa.attention_paged(q.values, replace(kv, q_scale=torch.ones(3)), *seq)


@pytest.mark.parametrize(("given", "message"), [
    ({"dtype": torch.float8_e4m3fnuz}, r"q, k and v have dtype torch\.float8_e4m3fnuz; with 8-bit queries the sm90"),
    ({"per": 64, "dim": 128}, "q has a scale per 64; with 8-bit queries the sm90 backend takes tensor, head, token"),
    ({"dim": 72}, "head_dim of k is 72; with 8-bit queries"),
    ({"backend": "gfx950"}, "the gfx950 backend has no kernels for 8-bit queries"),
    ({"backend": "sm100", "dtype": torch.float8_e4m3fnuz}, r"8-bit queries the sm100 backend takes torch\.float8_e4"),
])  # fmt: skip
def test_queries_of_8_bits_that_kernels_do_not_take(given, message):
    x = wa.quantize(made(1, 4, 2, given.get("dim", 64)), given.get("dtype", E4M3), per=given.get("per", "head"))
    with pytest.raises(wa.AttentionError, match=message):
        wa.attention(x, x, x, backend=f"simulate:{given.get('backend', 'sm90')}")


@pytest.mark.parametrize("scaled", [(), ("k",), ("v",), ("k", "v"), ("q",)], ids=str)
def test_a_compiled_graph_keeps_the_scales(scaled):
    """The text of a call says which of the tensors behind it are scales."""
    x = made(4, 6, HEADS_KV, DIM).to(E4M3)
    scales = {f"{name}_scale": torch.ones(HEADS if name == "q" else HEADS_KV) * 3 for name in scaled}
    seq = wa.Ragged(torch.tensor([0, 1, 2], dtype=torch.int32), max_q=1)
    kv = wa.PagedKV(x, x, torch.zeros(2, 2).int(), torch.ones(2).int(), **scales)
    for sequence in (Dense(**scales), wa.Ragged(seq.cu_q, seq.cu_q, **scales), kv, PagedRagged(kv, seq)):
        q = made(4, 6, HEADS, DIM) if sequence.kind == "dense" else made(2, 1, HEADS, DIM)
        q = q.to(E4M3) if scaled == ("q",) else q
        k = x
        if "ragged" in sequence.kind:
            q, k = q.flatten(0, 1), x[0, :2]
        call = Call(q, k, k, sequence)
        text = write(call, validate(call, read_values=False), False)
        again = sequence_of(read(text, (), ()).sequence, x, x, list(sequence.indices().values()))
        assert type(again) is type(sequence) and again.bounds() == sequence.bounds()
        assert list(again.indices()) == list(sequence.indices())
        assert all(a is b for a, b in zip(again.indices().values(), sequence.indices().values(), strict=True))


Q, VALUES = torch.zeros(2, 1, HEADS, DIM), torch.zeros(4, 6, HEADS_KV, DIM).to(E4M3)
BAD = {
    "two formats": (
        (VALUES, VALUES.to(E5M2)),
        {},
        "v_pages has dtype torch.float8_e5m2; kv.v_pages must have the dtype",
    ),
    "one of 8 bits": (
        (VALUES, VALUES.float()),
        {},
        "kv.v_pages has dtype torch.float32; kv.v_pages must have the dtype of",
    ),
    "8 and 16 bits": (
        (VALUES.float(), VALUES),
        {},
        "kv.v_pages has dtype torch.float8_e4m3fn; kv.v_pages must have the",
    ),
    "scale of fp32": ((VALUES.float(),) * 2, {"k_scale": torch.ones(())}, "scales belong to values of 8 bits"),
    "fp16 scale": ((VALUES,) * 2, {"k_scale": torch.ones(()).half()}, "kv.k_scale has dtype torch.float16; .*float32"),
    "number": ((VALUES,) * 2, {"v_scale": 1.0}, "kv.v_scale is a float; kv.v_scale must be a torch.Tensor"),
    "query heads": (
        (VALUES,) * 2,
        {"k_scale": torch.ones(HEADS)},
        r"kv.k_scale has shape \(4,\); .*one of \(\), \(2,\)",
    ),
    "dense tokens": ((VALUES,) * 2, {"k_scale": torch.ones(24, 2)}, r"kv.k_scale has shape \(24, 2\)"),
    "blocks of 32": ((VALUES,) * 2, {"k_scale": torch.ones(4, 6, 2, 4)}, r"kv.k_scale has shape \(4, 6, 2, 4\)"),
    "NaN": ((VALUES,) * 2, {"k_scale": torch.tensor([1.0, float("nan")])}, r"kv.k_scale\[1\] is nan; a scale must be"),
    "negative": ((VALUES,) * 2, {"v_scale": torch.tensor(-1.0)}, "kv.v_scale is -1.0; a scale must be positive"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    pages, scales, message = BAD[name]
    kv = wa.PagedKV(*pages, torch.zeros(2, 2).int(), torch.ones(2).int(), **scales)
    with pytest.raises(wa.AttentionError, match=message) as caught:
        wa.attention_paged(Q, kv)
    assert len(caught.value.reasons) == 1


def test_more_bad_input():
    q8 = Q.to(E4M3)
    with pytest.raises(wa.AttentionError, match=r"q has dtype torch\.int8; q must be one of"):
        wa.attention(Q.to(torch.int8), VALUES[:2], VALUES[:2])
    with pytest.raises(wa.AttentionError, match=r"k has dtype torch\.float32; k must have the dtype of q"):
        wa.attention(q8, VALUES[:2].float(), VALUES[:2])
    with pytest.raises(wa.AttentionError, match=r"out has dtype torch\.float8_e4m3fn; for 8-bit queries it must be"):
        wa.attention(q8, VALUES[:2], VALUES[:2], out=torch.empty_like(q8))
    for bad in ({"dtype": torch.int8}, {"per": "row"}, {"per": 32}, {"scale": torch.ones(3)}):
        with pytest.raises(wa.AttentionError):
            wa.quantize(Q, **bad)
    with pytest.raises(wa.AttentionError, match="head_dim 96; per=64 needs a multiple of 64"):
        wa.quantize(torch.zeros(2, 2, 96), per=64)
    seq, one = wa.Ragged(torch.tensor([0, 1, 2], dtype=torch.int32), k_scale=torch.ones(())), torch.ones(2).int()
    with pytest.raises(wa.AttentionError, match=r"over pages scales belong to kv\.k_scale"):
        wa.attention_paged(Q[:, 0], wa.PagedKV(VALUES, VALUES, torch.zeros(2, 2).int(), one), seq)


def test_rotated_queries_and_keys_have_the_same_scores():
    """Blocks of 64 of 192 columns: a Hadamard matrix over the root of its size, so its own inverse."""
    x, rotation = made(2, 9, HEADS, 192), wa.Hadamard()
    turned = rotation.applied(x)
    near = {"rtol": 0, "atol": 1e-6 * x.abs().max().item()}
    torch.testing.assert_close(rotation.applied(turned), x, **near)
    matrix = torch.ones(1, 1)
    for _ in range(6):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    torch.testing.assert_close(turned, (x.unflatten(-1, (3, 64)) @ matrix / 8).flatten(-2), **near)
    stored = wa.quantize(x, per="token", rotation=rotation)
    assert torch.equal(stored.values.view(torch.uint8), wa.quantize(turned, per="token").values.view(torch.uint8))
    with pytest.raises(wa.AttentionError, match=r"rotation is .*; it must be None or Hadamard\(\)"):
        wa.quantize(x, rotation=wa.Hadamard)
    with pytest.raises(wa.AttentionError, match=r"scale is 0\.0; a scale must be positive and finite"):
        wa.quantize(x, scale=torch.tensor(0.0))
    x = x[..., :96]
    with FakeTensorMode() as fake:  # what is kept serves every later call
        wa.Hadamard().applied(fake.from_tensor(x))
    with torch.inference_mode():
        wa.Hadamard().applied(x)
    assert wa.Hadamard().applied(x.requires_grad_()).requires_grad


def test_gradients_of_the_queries_flow_through_the_reference():
    q = made(1, 2, HEADS, DIM).requires_grad_()
    x = wa.quantize(made(1, 9, HEADS_KV, DIM), per="token")
    (found,) = torch.autograd.grad(wa.attention(q, x, x).sum(), q)
    wide = x.dequantized()
    (expected,) = torch.autograd.grad(wa.attention(q, wide, wide).sum(), q)
    assert torch.equal(found, expected) and bool(found.any())


def test_programs_and_columns_of_the_quantising_kernels():
    """792 programs share a tensor, at least one a head and at most one a block; columns are a power of two."""
    assert [programs_of_head(blocks, 8) for blocks in (5, 99, 100)] == [5, 99, 99]
    assert [programs_of_head(100, heads) for heads in (1, 792, 793)] == [100, 1, 1]
    fields = {"rows": 1, "run": 8, "stored_run": 8, "per": "head", "sizes": 0, "given": False, "largest": 448.0}
    widths = [QuantiseConfig(dim=dim, **fields, sequences=False).width for dim in (64, 65, 96, 128, 576)]
    assert widths == [64, 128, 128, 128, 1024]
