"""8-bit latents beside 16-bit rotary parts: rules, the reference, and the machine code of the Hopper kernel."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

import warpattn as wa
from tests.drawn import drawn
from warpattn.kernels.sm90.decode.choice import SLACK
from warpattn.kernels.sm90.mla.config import choose
from warpattn.kernels.sm90.mla.launch import list_launches
from warpattn.kernels.sm90.prefill.config import SMEM_LIMIT
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.operands import Operands
from warpattn.runtime import compiler

TABLE = torch.tensor([[3, 0, 1], [2, 4, 0]], dtype=torch.int32)
LENGTHS = torch.tensor([40, 20], dtype=torch.int32)
E4M3 = torch.float8_e4m3fn


def query(tokens: int = 1, dtype: torch.dtype = torch.bfloat16, dim: int = 576) -> torch.Tensor:
    return torch.randn(2, tokens, 16, dim, generator=torch.Generator().manual_seed(1)).to(dtype)


def pages(page: int = 16, scale: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> wa.LatentPages:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(5, page, 1, 512, generator=generator).to(E4M3)
    rope = torch.randn(5, page, 1, 64, generator=generator).to(dtype)
    return wa.LatentPages(latents, rope, TABLE, LENGTHS, scale=scale)


@pytest.mark.parametrize("shape", [(), (1,), (5, 16, 1), None], ids=str)
def test_rotary_parts_of_8_bits_have_the_same_scale(shape):
    scale = None if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5
    kv, one = pages(scale=scale, dtype=E4M3), torch.ones(()) if scale is None else scale
    k = torch.cat([wa.Quantized(x, one).dequantized() for x in (kv.k_pages, kv.rope)], -1)
    wide = wa.PagedKV(k, k[..., :512], TABLE, LENGTHS)
    found, lse = wa.attention_paged(query(2), kv, mask=wa.Causal(), return_lse=True)
    expected, expected_lse = wa.attention_paged(query(2).float(), wide, mask=wa.Causal(), return_lse=True)
    torch.testing.assert_close(found.float(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("shape", [(), (1,), (5, 16, 1), (5, 16, 1, 4)], ids=str)
def test_the_reference_is_that_of_dequantised_keys(shape):
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5
    kv = pages(scale=scale)
    latents = wa.Quantized(kv.k_pages, scale).dequantized()
    k = torch.cat([latents, kv.rope.float()], -1)
    wide = wa.PagedKV(k, k[..., :512], TABLE, LENGTHS)
    found, lse = wa.attention_paged(query(2), kv, mask=wa.Causal(), return_lse=True)
    expected, expected_lse = wa.attention_paged(query(2).float(), wide, mask=wa.Causal(), return_lse=True)
    torch.testing.assert_close(found.float(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, expected_lse)


def test_plans_over_latents_give_what_calls_give():
    kv, seq = pages(), wa.Ragged(torch.tensor([0, *range(2, 2 * len(LENGTHS) + 1, 2)], dtype=torch.int32))
    q = query(2)
    rows = q.flatten(0, 1)
    expected = wa.attention_paged(q, kv, mask=wa.Causal())
    torch.testing.assert_close(wa.DecodePlan(q, kv, mask=wa.Causal())(q, kv), expected, atol=0, rtol=0)
    plan = wa.StepPlan(rows, kv, seq, mask=wa.Causal())
    plan.update(seq.cu_q, LENGTHS, TABLE)
    assert isinstance(plan.kv, wa.LatentPages) and plan.kv.rope is kv.rope
    torch.testing.assert_close(plan(rows, plan.kv, plan.seq), expected.flatten(0, 1), atol=0, rtol=0)


def test_bytes_are_read_where_they_are():
    cache = torch.zeros(5, 16, 1, 656, dtype=torch.uint8)
    kv = wa.LatentPages.of_bytes(cache, TABLE, LENGTHS)
    kv.k_pages[3, 7, 0, 100] = 2.0
    kv.k_scale[3, 7, 0, 1] = 0.5
    kv.rope[3, 7, 0, 63] = -1.0
    token = cache[3, 7, 0]
    assert token[100] == torch.tensor(2.0).to(E4M3).view(torch.uint8)
    assert token[516:520].view(torch.float32) == 0.5 and token[654:].view(torch.bfloat16) == -1.0
    assert int((cache != 0).sum()) == 4, "one byte of 2.0, one of 0.5, two of -1"


def test_a_plan_reads_both_parts_of_a_cache():
    q, kv = query(2), pages(scale=torch.tensor(0.5))
    found = wa.DecodePlan(q, kv, mask=wa.Causal())(q, kv)
    assert torch.equal(found, wa.attention_paged(q, kv, mask=wa.Causal())) and found.any()


def with_a_head_more(kv: wa.LatentPages) -> wa.LatentPages:
    return wa.LatentPages(kv.k_pages, kv.rope.expand(-1, -1, 2, -1), TABLE, LENGTHS)


BAD = {
    "kv.rope has shape (5, 16, 2, 64); it must be (5, 16, 1, columns) as the latents": lambda: (
        query(), with_a_head_more(pages())),
    "q has head_dim 512; it must have the latents' columns": lambda: (query(dim=512), pages()),
    "kv.rope has dtype torch.float16; it must have the dtype of q": lambda: (query(), pages(dtype=torch.float16)),
    "rotary parts of 8 bits have the latents' scale per tensor or token": lambda: (query(), pages(
        dtype=E4M3, scale=torch.ones(5, 16, 1, 4))),
    "kv.scale has shape (5, 16, 1, 3)": lambda: (query(), pages(scale=torch.ones(5, 16, 1, 3))),
}
REFUSED = {
    "of 8-bit latents the sm90 backend takes torch.bfloat16": lambda: (query(dtype=torch.float16), pages(
        dtype=torch.float16)),
    "takes tensor, token, 128": lambda: (query(), pages(scale=torch.ones(5, 16, 1, 8))),
    "takes multiples of 8": lambda: (query(), pages(20)),
    "kernels take at most 16": lambda: (query(17), pages()),
}  # fmt: skip


@pytest.mark.parametrize("message", [*BAD, *REFUSED])
def test_wrong_calls(message):
    q, kv = (BAD | REFUSED)[message]()
    with pytest.raises(wa.AttentionError, match=re.escape(message)):
        wa.attention_paged(q, kv, backend="reference" if message in BAD else "simulate:sm90")


@pytest.mark.parametrize("scale", [torch.tensor(-0.5), torch.ones(2), torch.ones(1, dtype=torch.float16), "x"], ids=str)
def test_a_wrong_scale_is_one_sentence(scale):
    with pytest.raises(wa.AttentionError) as error:
        wa.attention_paged(query(), pages(scale=scale))
    (reason,) = error.value.reasons
    assert reason.startswith("kv.scale ")


def test_a_scale_of_the_only_head_is_one_for_all():
    scale = torch.tensor([0.5])
    kv, q = pages(scale=scale), query()
    checked = validate(Call(q, kv.k_pages, kv.v_pages, kv, None, None, backend="simulate:sm90"))
    assert checked.problem.scales.k == "tensor" and kv.k_scale.data_ptr() == scale.data_ptr()
    assert torch.equal(wa.attention_paged(q, kv), wa.attention_paged(q, pages(scale=scale[0])))


def test_blackwell_takes_what_hopper_takes():
    with pytest.raises(wa.AttentionError, match=r"of 8-bit latents the sm100 backend takes torch\.bfloat16"):
        wa.attention_paged(query(dtype=torch.float16), pages(dtype=torch.float16), backend="simulate:sm100")


@pytest.mark.parametrize(("arch", "dtype"), [("gfx942", E4M3), ("gfx950", torch.float8_e4m3fnuz)])
def test_cdna_takes_the_formats_of_its_chip(arch, dtype):
    kv = pages()
    kv = wa.LatentPages(kv.k_pages.view(dtype), kv.rope, kv.block_table, kv.lengths, scale=kv.k_scale)
    with pytest.raises(wa.AttentionError, match=f"have dtype {dtype}; of 8-bit latents the {arch} backend takes"):
        wa.attention_paged(query(), kv, backend=f"simulate:{arch}")


def test_what_is_no_cache():
    with pytest.raises(wa.AttentionError, match=r"cache is torch.uint8 \(5, 16, 1, 640\); it must be uint8"):
        wa.LatentPages.of_bytes(torch.zeros(5, 16, 1, 640, dtype=torch.uint8), TABLE, LENGTHS)
    wide, odd = (torch.zeros(5, 16, 1, size, dtype=torch.uint8) for size in (2 * 656, 657))
    words = "a token's bytes must be in one piece and begin at multiples of 16"
    with pytest.raises(wa.AttentionError, match=words):
        wa.LatentPages.of_bytes(wide[..., ::2], TABLE, LENGTHS)
    with pytest.raises(wa.AttentionError, match=words):
        wa.LatentPages.of_bytes(wide[..., 1:657], TABLE, LENGTHS)
    with pytest.raises(wa.AttentionError, match=words):
        wa.LatentPages.of_bytes(odd[..., :656], TABLE, LENGTHS)
    rope = torch.zeros(5, 16, 1, 65).bfloat16()[..., 1:]
    with pytest.raises(wa.AttentionError, match="its rows must be in one piece and start at multiples of 16 bytes"):
        wa.LatentPages(torch.zeros(5, 16, 1, 512).to(E4M3), rope, TABLE, LENGTHS)


@cache
def compiled(page: int, dtype: torch.dtype):
    pytest.importorskip("triton")
    kv, q = pages(page, dtype=dtype), query()
    call = Call(q, kv.k_pages, kv.v_pages, kv, wa.Causal(), return_lse=True, backend="simulate:sm90")
    checked = validate(call, read_values=False)
    x = Operands(q, kv.k_pages, kv.v_pages, q[..., :512], torch.empty(checked.lse_shape), None)
    choice = choose(checked.problem, ARCHS["sm90"], swap_ab=False)
    launch, *_ = list_launches(checked, x, kv, choice)
    return choice.config, compiler.compiled(launch)


# Pages and the bytes of stack, Triton 3.9.0: numbers that an item needs once. Loops over key tiles read up to six of
# them in the role that converts, three in that with the scores.
STACK = {(64, torch.bfloat16): 152, (16, torch.bfloat16): 168, (64, E4M3): 152}


@pytest.mark.full
@pytest.mark.parametrize(("page", "rope"), drawn(STACK, [(64, torch.bfloat16)]))
def test_machine_code(page, rope):
    from warpattn.machine_code.roles import read_roles, role_faults
    from warpattn.machine_code.sass import opcode_counts, resources

    config, kernel = compiled(page, rope)
    counts, used = opcode_counts(kernel.asm["cubin"]), resources(kernel.asm["cubin"])
    assert kernel.metadata.shared <= min(SMEM_LIMIT, config.smem_bytes + SLACK)
    assert used.stack <= STACK[page, rope]
    assert role_faults(kernel.asm) == [], "roles would wait for registers or for each other"
    roles = read_roles(kernel.asm)
    assert roles and [role.registers for role in roles.roles] == [role.registers for role in config.topology.roles]
    narrow = config.dim_qk if rope == E4M3 else config.dim_v
    elements = config.block_n * narrow // 128  # of a thread of the role that converts
    assert counts["HADD2"] == elements, "each e4m3 becomes fp32 by way of a pair of fp16"
    assert counts["UTMALDG"] == 3 * config.boxes, "each warp starts the copy of 128 bytes a row"
    assert counts["WARPGROUP"] < counts["HGMMA"] / 2, "products do not wait for each other"


@cache
def compiled_with_swap_ab(page: int, rope: torch.dtype):
    pytest.importorskip("triton")
    kv, q = pages(page, dtype=rope), query()
    call = Call(q, kv.k_pages, kv.v_pages, kv, wa.Causal(), return_lse=True, backend="simulate:sm90")
    ready = validate(call)
    found = choose(ready.problem, ARCHS["sm90"])
    assert found.config.swap_ab
    out = torch.empty(2, 1, 16, 512).bfloat16()
    operands = Operands(q, kv.k_pages, kv.v_pages, out, torch.empty(ready.lse_shape), None)
    launch, *_ = list_launches(ready, operands, kv, found)
    return found.config, compiler.compiled(launch)


SWAP_AB = [(64, torch.bfloat16), (16, torch.bfloat16), (64, E4M3)]  # pages and rotary parts
# Bytes of stack of each: words that are spilled outside of the loops over tiles, of which these read 4, 1 and 11, since
# scores stay in registers beside their exponents until the vote on references (bench/notes.md, 231 and 235).
SWAP_AB_STACK = dict(zip(SWAP_AB, (104, 136, 152), strict=True))


@pytest.mark.full
@pytest.mark.parametrize(("page", "rope"), drawn(SWAP_AB, [(64, torch.bfloat16)]))
def test_machine_code_with_swap_ab(page, rope):
    from warpattn.kernels.sm90.decode.choice import SM_SMEM
    from warpattn.machine_code.roles import role_faults
    from warpattn.machine_code.sass import opcode_counts, resources

    config, kernel = compiled_with_swap_ab(page, rope)
    counts, used = opcode_counts(kernel.asm["cubin"]), resources(kernel.asm["cubin"])
    assert kernel.metadata.shared <= config.smem_bytes + SLACK
    assert config.smem_bytes + SLACK + 1024 <= SM_SMEM
    assert used.stack <= SWAP_AB_STACK[page, rope] and role_faults(kernel.asm) == []
    # Each warpgroup has 64 keys of the scores and its share of the output's columns.
    products = 576 // 16 + 2 * (config.half // 64) * (config.block_n // 16) // config.warpgroups
    assert (counts["HGMMA"], counts["HMMA"]) == (products, 0)
    threads = 128 * config.warpgroups
    converted = 2 * config.dim_v * config.block_n // threads // 2  # pairs of a thread, as keys and as values
    assert counts["F2FP"] >= converted + (config.rope * config.block_n // threads // 2 if rope == E4M3 else 0)
    assert counts["HADD2"] == 0, "e4m3 becomes fp16 in one step"
    assert counts["WARPGROUP"] < counts["HGMMA"] / 2, "products do not wait for each other"
