"""Latent attention (MLA, absorbed): rules, plan, and the machine code of the Hopper kernel, compiled without a card."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import warpattn as wa
from tests.drawn import drawn
from tests.launches import ROWS, choice_of, small_call
from warpattn.errors import AttentionError
from warpattn.kernels.sm90.decode.choice import SLACK
from warpattn.kernels.sm90.decode.config import Combine, LengthSums, Schedule
from warpattn.kernels.sm90.mla.config import choose, choose_tiles
from warpattn.kernels.sm90.mla.launch import list_launches
from warpattn.kernels.sm90.prefill.config import SMEM_LIMIT
from warpattn.problem import Call, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.element import BF16
from warpattn.runtime import compiler
from warpattn.runtime.plan import plan
from warpattn.sequences import Dense, PagedKV, Ragged

DIM, DIM_V = 576, 512


def cache_of(page: int = 16, pages: int = 5) -> torch.Tensor:
    return torch.randn(pages, page, 1, DIM).bfloat16()


def paged(k: torch.Tensor, v: torch.Tensor | None = None) -> PagedKV:
    table = torch.tensor([[3, 0, 1], [2, 4, 0]], dtype=torch.int32)
    return PagedKV(k, k[..., :DIM_V] if v is None else v, table, torch.tensor([40, 20], dtype=torch.int32))


def query(tokens: int = 1, heads: int = 16) -> torch.Tensor:
    return torch.randn(2, tokens, heads, DIM).bfloat16()


def refusal(q: torch.Tensor, kv: PagedKV, backend: str) -> str:
    with pytest.raises(AttentionError) as refused:
        wa.attention_paged(q, kv, backend=backend)
    return str(refused.value)


def test_values_of_their_own_are_refused():
    k = cache_of()
    said = refusal(query(), paged(k, k[..., :DIM_V].clone()), "simulate:sm90")
    assert "kv.v_pages must be the view kv.k_pages[..., :512]" in said
    assert "must be the view" in refusal(query(), paged(k, k[..., 64:]), "simulate:sm90"), "other columns"
    whole = torch.randn(10, 16, 1, DIM).bfloat16()
    assert "must be the view" in refusal(query(), paged(whole[:5], whole[::2, ..., :DIM_V]), "simulate:sm90")


def test_many_tokens_and_ragged_batches_are_refused():
    assert "at most 16" in refusal(query(17), paged(cache_of()), "simulate:sm90")
    rows, k = torch.randn(5, 16, DIM).bfloat16(), torch.randn(5, 1, DIM).bfloat16()
    sequence = Ragged(torch.tensor([0, 2, 5], dtype=torch.int32))
    with pytest.raises(AttentionError, match="kernels take dense and paged ones"):
        wa.attention_varlen(rows, k, k[..., :DIM_V], sequence, backend="simulate:sm90")


@pytest.mark.parametrize("arch", ["sm90", "sm100", "gfx942", "gfx950"])
def test_ragged_queries_over_pages_promise_few(arch):
    kv, rows = paged(cache_of()), torch.randn(20, 16, DIM).bfloat16()
    with pytest.raises(AttentionError, match=r"q has up to 20 tokens a sequence by seq\.max_q; .* at most 16"):
        wa.attention_paged(rows, kv, Ragged(torch.tensor([0, 2, 20], dtype=torch.int32)), backend=f"simulate:{arch}")


@pytest.mark.parametrize("arch", ["sm90", "sm100", "gfx942", "gfx950"])
def test_every_architecture_plans_it(arch):
    """Up to 16 tokens of a sequence."""
    kv = paged(cache_of())
    for tokens in (1, 16):
        call = Call(query(tokens), kv.k_pages, kv.v_pages, kv, backend=f"simulate:{arch}")
        assert "head dim 576/512" in str(plan(validate(call, read_values=False).problem, arch))


def test_other_wide_head_dims_are_told_of_these():
    k = cache_of()
    said = refusal(query(), PagedKV(k, k, *paged(k).indices().values()), "simulate:sm90")
    assert "or 576 with values of 512 (latent attention)" in said


def test_the_reference_takes_any_values():
    k = cache_of()
    out = wa.attention_paged(query(), paged(k, k[..., 64:].clone()))
    assert out.shape == (2, 1, 16, DIM_V) and out.isfinite().all() and out.any()


@pytest.mark.parametrize("seq_k", [40, 4096])
def test_dense_keys_are_planned_however_few(seq_k):
    k = torch.empty(2, seq_k, 1, DIM, dtype=torch.bfloat16)
    call = Call(query(heads=128), k, k[..., :DIM_V], Dense(), backend="simulate:sm90")
    found = plan(validate(call).problem)
    assert found.kernel == "sm90.mla" and found.choice.grid == (128,)
    assert "2 heads of 2 row tiles" in str(found) and "latents are read once" in str(found)


def test_shared_memory_holds_two_tiles():
    config = choose_tiles(BF16, 64)
    factors, sums, barriers = 2 * 64 * 4 * 4, 2 * 64 * 4 * 4, 2 * (2 + 4 + 2 + 1) + 1
    assert config.smem_bytes == (64 + 2 * 64) * 576 * 2 + factors + sums + barriers * 8
    assert config.smem_bytes + SLACK <= SMEM_LIMIT < config.smem_bytes + config.half_bytes
    assert config.topology.registers <= 512 * 128 and config.topology.threads == 512


def test_shared_memory_holds_two_tiles_and_a_half_with_swap_ab():
    assert chosen(16).swap_ab and not chosen(17).swap_ab
    config = chosen(16, swap_ab=True)
    assert config.smem_bytes == 16 * (576 + 64) * 2 + 8192 + 5 * 64 * 256 * 2 + 3 * 64 * 64 * 2 + 2 * (5 + 3) * 8
    assert config.smem_bytes + SLACK <= SMEM_LIMIT
    with pytest.raises(ValueError, match="up to 16 rows"):
        chosen(17, swap_ab=True)


@pytest.mark.parametrize(("batch", "separate"), [(127, True), (128, False)])
def test_few_sequences_have_parts_that_a_second_kernel_adds_up(batch, separate):
    assert chosen(16, batch, swap_ab=True).combine.separate_kernel == separate


def chosen(heads: int, batch: int = 2, **how: bool):
    """The configuration for dense keys."""
    k = torch.empty(batch, 64, 1, DIM, dtype=torch.bfloat16)
    q = torch.empty(batch, 1, heads, DIM, dtype=torch.bfloat16)
    problem = validate(Call(q, k, k[..., :DIM_V], Dense(), backend="simulate:sm90"), read_values=False).problem
    return choose(problem, ARCHS["sm90"], **how).config


@cache
def compiled_with_swap_ab(page: int, separate: bool):
    pytest.importorskip("triton")
    kind = "paged" if page else "dense"
    call = small_call("sm90", (DIM, DIM_V), kind=kind, rows=(1, ROWS), page=page, heads=(16, 1))
    found = choose(call.checked.problem, ARCHS["sm90"], swap_ab=True)
    found = replace(found, config=replace(found.config, combine=Combine(0, separate)))
    launch, *_ = list_launches(*call, found)
    return found.config, compiler.compiled(launch)


WITH_SWAP_AB = [(0, False), (3, False), (16, False), (64, False), (64, True)]


@pytest.mark.parametrize(("page", "separate"), drawn(WITH_SWAP_AB, [(64, False)]))
def test_machine_code_with_swap_ab(page, separate):
    from warpattn.machine_code.roles import role_faults
    from warpattn.machine_code.sass import opcode_counts, resources

    config, kernel = compiled_with_swap_ab(page, separate)
    counts, used = opcode_counts(kernel.asm["cubin"]), resources(kernel.asm["cubin"])
    assert config.smem_bytes - SLACK <= kernel.metadata.shared <= config.smem_bytes + SLACK
    assert (used.stack, used.spills) == (0, 0) and role_faults(kernel.asm) == []
    products = DIM // 16 + 2 * (config.half // 64) * (config.block_n // 16)
    assert (counts["HGMMA"], counts["HMMA"]) == (products, 0)
    assert counts["WARPGROUP"] < counts["HGMMA"] / 4, "products do not wait for each other"
    assert counts["UTMALDG"] == (0 if config.gathers else config.boxes * DIM // 64)


@cache
def compiled(page: int):
    pytest.importorskip("triton")
    sums = LengthSums(lane=4) if page else None
    schedule = Schedule(sums=sums, head_overhead=int(page > 0), has_lengths=page > 0)
    config = replace(choose_tiles(BF16, page), schedule=schedule)
    kind = "paged" if page else "dense"
    call = small_call("sm90", (DIM, DIM_V), kind=kind, rows=(1, ROWS), page=page, heads=(16, 1))
    launch, _ = list_launches(*call, replace(choose(call.checked.problem, ARCHS["sm90"]), config=config))
    return config, compiler.compiled(launch)


# Pages and the bytes of stack that the compiler spills to, Triton 3.9.0: with TMA through pages, numbers that an item
# needs once, in no warpgroup's loop over key tiles; the producer's loop reads one, and up to ten of the four boxes of
# pages of 16 keys.
STACK = {0: 0, 3: 0, 16: 120, 64: 24}


@pytest.mark.full
@pytest.mark.parametrize("page", drawn(STACK, [64]))
def test_machine_code(page):
    from warpattn.machine_code.roles import role_faults
    from warpattn.machine_code.sass import opcode_counts, resources

    config, kernel = compiled(page)
    counts = opcode_counts(kernel.asm["cubin"])
    assert kernel.metadata.shared <= min(SMEM_LIMIT, config.smem_bytes + SLACK)
    assert resources(kernel.asm["cubin"]).stack <= STACK[page]
    assert role_faults(kernel.asm) == []
    assert counts["HMMA"] == 0, "every product is a warpgroup product"
    assert counts["HGMMA"] == DIM // 16 + DIM_V // 128 * config.block_n // 16, "each product once"
    copies = 0 if config.gathers else config.boxes * DIM // 64
    assert counts["UTMALDG"] == copies, "a copy moves 64 columns, and no column is copied twice"
    assert counts["WARPGROUP"] < counts["HGMMA"] / 2, "products do not wait for each other"


@cache
def compiled_for_blackwell(page: int, heads: int):
    pytest.importorskip("triton")
    from warpattn.kernels.sm100.mla.config import LatentConfig
    from warpattn.kernels.sm100.mla.launch import latent_launches

    config = LatentConfig(BF16, DIM, DIM_V, page_size=page, splitk_partitions=1 if page else 4)
    kind, dims = "paged" if page else "dense", (DIM, DIM_V)
    checked, x, sequence = small_call("sm100", dims, kind=kind, rows=(1, ROWS), page=page, heads=(heads, 1))
    choice = choice_of(config, config.splitk_partitions)
    launch, *_ = latent_launches(checked, x, sequence, choice)
    return config, compiler.compiled(launch)


@pytest.mark.full
@pytest.mark.parametrize(("page", "heads"), drawn([(0, 16), (64, 16), (16, 128), (3, 16), (1, 16)], [(3, 16)]))
def test_machine_code_for_blackwell(page, heads):
    from warpattn.kernels.sm100.config import SMEM_LIMIT as LIMIT
    from warpattn.machine_code.roles import role_faults
    from warpattn.machine_code.sass import opcode_counts, resources

    config, kernel = compiled_for_blackwell(page, heads)
    assert role_faults(kernel.asm) == []
    counts, used = opcode_counts(kernel.asm["cubin"]), resources(kernel.asm["cubin"])
    assert config.smem_used <= kernel.metadata.shared <= min(LIMIT, config.smem_used + 512)
    assert kernel.metadata.tmem_size == 512 and config.tmem_used == 320, "columns are allocated in powers of two"
    assert (used.stack, used.spills) == (0, 0)
    assert counts["UTCHMMA"] == 2 * DIM // 16 + 2 * config.BN // 16, "Q·K before the loop and in it; P·V by halves"
    assert counts["UTCBAR"] == 4, "S twice; a slot given back; O"
    copied = page in (1, 3)
    assert counts["UTMALDG"] == (0 if copied else DIM // 64 * config.BN // config.box_rows)
