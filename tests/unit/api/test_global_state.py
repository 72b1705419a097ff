"""Torch's global state (default device, default dtype, regions of autocast) changes no result of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import warpattn as wa
from tests.launches import small_call
from warpattn.api import attention_backward
from warpattn.distributed.placement import Placement
from warpattn.integrations import flashinfer
from warpattn.integrations.flash_attn.bert_padding import pad_input, unpad_input
from warpattn.integrations.flash_attn.version3 import flash_attn_varlen_func
from warpattn.integrations.transformers import build_mask
from warpattn.runtime.launches import list_launches
from warpattn.serving.layers import EightBitCache, LargestStep, Layer
from warpattn.serving.warming import kernels_of


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "device": lambda: torch.device("meta"),  # as set_default_device("cuda") beside tensors on the CPU
    "fp64": lambda: default_dtype(torch.float64),
    "bf16": lambda: default_dtype(torch.bfloat16),
    "region of bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "region of fp16": lambda: torch.autocast("cpu", torch.float16),
}


def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=made, device="cpu", dtype=torch.float32).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def dense(dtype: torch.dtype) -> list[Tensor]:
    q, k, v = normal(1, 9, 2, 8, dtype=dtype), normal(1, 9, 1, 8, dtype=dtype), normal(1, 9, 1, 8, dtype=dtype)
    score = wa.CustomScore(lambda s, b, h, q, k: wa.where(b > 0, 0.1, 0.3) * s + k / 3)
    mask = wa.Causal() & wa.CustomMask(lambda b, h, q, k: b < 5)
    return list(wa.attention(q, k, v, mask=mask, score=score, return_lse=True))


def gradients(dtype: torch.dtype) -> list[Tensor]:
    q, k, v = (normal(1, 9, 2, 8, dtype=dtype) + i for i in range(3))
    out, lse = wa.attention(q, k, v, return_lse=True)
    return list(attention_backward(torch.ones_like(out), q, k, v, out, lse))


def trained(dtype: torch.dtype) -> list[Tensor]:
    """Gradients of two sequences, of queries in two tensors, and of gradients, with the backward in the region."""
    q, k, v = ((normal(2, 9, heads, 8, dtype=dtype) + heads).requires_grad_() for heads in (2, 1, 1))
    nope, rope = (normal(2, 9, 2, columns, dtype=dtype).requires_grad_() for columns in (6, 2))
    outs = wa.attention(q, k, v, mask=wa.Causal()), wa.attention(wa.LatentQuery(nope.detach(), rope), k, v)
    found = [x for out in outs for x in torch.autograd.grad(out, (k, v), torch.ones_like(out), retain_graph=True)]
    out = wa.attention(wa.LatentQuery(nope, rope), k, v)
    found += torch.autograd.grad(out, (nope, rope, k), torch.ones_like(out))
    out = outs[0]
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out), create_graph=True)
    return [*found, dq, *torch.autograd.grad(dq, (q, k), torch.ones_like(dq), allow_unused=True)]


def appended(dtype: torch.dtype) -> list[Tensor]:
    k, v, new = normal(2, 4, 1, 8, dtype=dtype), normal(2, 4, 1, 8, dtype=dtype), normal(1, 3, 1, 8, dtype=dtype)
    angles = normal(8, 2)
    wa.append_paged(k, v, ints(1, 0).view(1, 2), ints(6), new, new, cos=angles.cos(), sin=angles.sin())
    return [k, v]


def eight_bits(dtype: torch.dtype) -> list[Tensor]:
    made = [wa.quantize(normal(1, 70, 2, 64, dtype=dtype), per=per) for per in ("tensor", "head", "token", 64)]
    return [x for each in made for x in (each.scale, each.dequantized())]


def padding(dtype: torch.dtype) -> list[Tensor]:
    x, kept = normal(2, 5, 8, dtype=dtype), ints(1, 1, 1, 1, 1, 0, 0, 1, 1, 1).view(2, 5).bool()
    rows, indices, *_ = unpad_input(x, kept)
    return [rows, pad_input(rows, indices, 2, 5)]


def unused_rows(dtype: torch.dtype) -> list[Tensor]:
    x = normal(9, 2, 8, dtype=dtype)
    return [flash_attn_varlen_func(x, x, x, ints(0, 5, 9), ints(0, 5, 9), 5, 5, seqused_q=ints(3, 4))]


def shards(dtype: torch.dtype) -> list[Tensor]:
    place, x = Placement("zigzag", 2), normal(1, 8, 2, 4, dtype=dtype)
    cut = [place.cut(x, 1, rank) for rank in range(2)]
    return [*cut, place.join(x, 1)]


def pages(dtype: torch.dtype) -> list[Tensor]:
    cache, q = normal(8, 2, 16, 2, 64, dtype=dtype), normal(2, 4, 64, dtype=dtype)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, device="cpu"), "NHD")
    decode.plan(ints(0, 2, 3), ints(7, 4, 1), ints(5, 16), 4, 2, 64, 16)
    bits = flashinfer.packbits(ints(1, 0, 1, 1, 1, 1, 0, 1).bool(), "little")
    packed = flashinfer.single_prefill_with_kv_cache(q, cache[0, 0, :4], cache[0, 1, :4], packed_custom_mask=bits)
    return [decode.run(q, cache), packed]


def latents(dtype: torch.dtype) -> list[Tensor]:
    mla = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(0, device="cpu"))
    mla.plan(ints(0, 1), ints(0, 2), ints(3, 1), ints(21), 2, 512, 64, 16, True, 192**-0.5)
    nope, rope = normal(1, 2, 512, dtype=dtype), normal(1, 2, 64, dtype=dtype)
    joined = wa.LatentQuery(nope, rope).joined()
    return [joined, mla.run(nope, rope, normal(4, 16, 512, dtype=dtype), normal(4, 16, 64, dtype=dtype))]


CALLS = (dense, gradients, trained, appended, eight_bits, padding, unused_rows, shards, pages, latents)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_results_do_not_depend_on_it(call: Callable[[torch.dtype], list[Tensor]], state: str):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = call(dtype)
        with STATES[state]():
            found = call(dtype)
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)


def test_what_inference_mode_made_is_written_outside_of_it():
    """As kernels do, which torch does not ask."""
    with torch.inference_mode():
        q, k, v = normal(1, 2, 2, 16), normal(1, 2, 2, 16), normal(1, 2, 2, 16)
        cache = wa.PagedKV(normal(2, 4, 2, 16), normal(2, 4, 2, 16), ints(0, 1)[None], ints(2))
        seq, outs = wa.Ragged(ints(0, 2)), [torch.empty_like(q), torch.empty_like(q)]
        step, decode = wa.StepPlan(q[0], cache, seq), wa.DecodePlan(q, (k, v), return_lse=True)
        step.update(seq.cu_q, cache.lengths, cache.block_table)
    kv = (cache.k_pages, cache.v_pages)
    wa.append_paged(*kv, cache.block_table, cache.lengths, k, v)
    assert torch.equal(cache.k_pages[0, :2], k[0])
    wa.append_slots(k[0], v[0], *kv, torch.tensor([4, 5]))
    assert torch.equal(cache.v_pages[1, :2], v[0])
    step.update(seq.cu_q, cache.lengths, cache.block_table)
    truth, lse = wa.attention(q, k, v, return_lse=True)
    given = [wa.attention(q, k, v, out=outs[0]), wa.merge_states(truth, lse, out=outs[1])[0]]
    for found in (*given, step(q[0], step.kv, step.seq)[None], *decode(q, (k, v))[:1]):
        torch.testing.assert_close(found, truth)


def test_masks_are_drawn_and_made_for_models_beside_another_default_device():
    expected = str(wa.Causal().picture(4, 6))
    with torch.device("meta"):
        assert str(wa.Causal().picture(4, 6)) == expected
        made = build_mask(batch_size=1, q_length=2, kv_length=6, q_offset=1, device="cpu")
        assert torch.equal(made.mask.room, ints(3))


def test_kernels_are_planned_on_the_host():
    call = small_call("sm90", (64, 64))
    with torch.device("meta"):
        launches = list_launches(*call)
    assert all(x.device.type == "cpu" for each in launches for x in each.args.values() if isinstance(x, Tensor))


@pytest.mark.parametrize("state", ["device", "fp64"])
def test_warming_finds_the_same_kernels(state: str):
    layers = [Layer(8, 2, 64, 64, sinks=True), Layer(8, 2, 64, 64, cache=EightBitCache(per="token"))]
    step = LargestStep(2, 64, 256)
    expected = {kernel.name for kernel in kernels_of(layers, step, "sm90", "engine")}
    with STATES[state]():
        assert {kernel.name for kernel in kernels_of(layers, step, "sm90", "engine")} == expected


@pytest.mark.filterwarnings("ignore:`torch.jit.trace`:DeprecationWarning")
@pytest.mark.parametrize("backend", ["reference", "simulate:sm90"])
def test_torch_jit_trace_would_keep_the_tiles_of_its_example(backend: str):
    q = normal(1, 9, 2, 64, dtype=torch.float16)
    with pytest.raises(wa.AttentionError, match=r"q is recorded by torch.jit.trace; .* use torch.export"):
        torch.jit.trace(lambda x: wa.attention(x, q, q, mask=wa.Causal(), backend=backend), (q,), check_trace=False)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch imports decompositions
def test_forward_mode_tangents_reach_merged_states_or_are_refused():
    out, lse = normal(1, 3, 2, 8), normal(1, 2, 3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(out, out)
        merged, _ = wa.merge_states(dual, lse, out, lse)
        torch.testing.assert_close(forward_ad.unpack_dual(merged).tangent, out / 2)
        with pytest.raises(wa.AttentionError, match="its merge has no backward"):
            wa.merge_states(dual, lse, out, lse, backend="simulate:sm90")
