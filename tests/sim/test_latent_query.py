"""Latent attention with queries in two tensors, simulated on every architecture: the bits of queries in one."""

import pytest
import torch

pytest.importorskip("triton")

import warpattn as wa
from tests.drawn import drawn
from warpattn.errors import AttentionError
from warpattn.problem.backends import LATENT

L, SCALE = LATENT.v, 192**-0.5
NAMED = {  # page size (0: dense), tokens, heads, mask
    "dense": (0, 1, 16, wa.Full()),
    "pages": (64, 2, 40, wa.Causal()),
    "odd-pages": (3, 1, 16, wa.Causal()),
    "window": (16, 4, 16, wa.SlidingWindow(40)),
}
CASES = {f"{arch}-{name}": (arch, name) for arch in ("sm90", "sm100", "gfx942", "gfx950") for name in NAMED}


def as_engines_have_them(batch: int, tokens: int, heads: int) -> wa.LatentQuery:
    """Latent columns heads first, as a batched product leaves them; rotary ones the last of a projection, whose others
    are NaN here."""
    nope = torch.randn(heads, batch * tokens, L).bfloat16().transpose(0, 1).unflatten(0, (batch, tokens))
    projected = torch.full((batch, tokens, heads, 192), torch.nan).bfloat16()
    projected[..., 128:] = torch.randn(batch, tokens, heads, 64)
    return wa.LatentQuery(nope, projected[..., 128:])


def pages(page: int, lengths: tuple[int, ...]) -> wa.PagedKV:
    """A cache whose pages are in random order, NaN after each sequence's end."""
    counts = [-(-length // page) for length in lengths]
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    cache = torch.full((sum(counts) + 1, page, 1, LATENT.qk), torch.nan).bfloat16()
    free = iter((torch.randperm(sum(counts)) + 1).tolist())
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = torch.tensor([next(free) for _ in range(count)], dtype=torch.int32)
        rows = cache[table[row, :count].long()].flatten(0, 1)
        rows[:length] = torch.randn(length, 1, LATENT.qk)
        cache[table[row, :count].long()] = rows.unflatten(0, (count, page))
    return wa.PagedKV(cache, cache[..., :L], table, torch.tensor(lengths, dtype=torch.int32))


@pytest.mark.parametrize("case", drawn(CASES, ["gfx950-dense"]))
def test_the_bits_of_one_tensor(case):
    torch.manual_seed(0)
    arch, name = CASES[case]
    page, tokens, heads, mask = NAMED[name]
    q = as_engines_have_them(2, tokens, heads)
    tail = {"mask": mask, "scale": SCALE, "return_lse": True, "backend": f"simulate:{arch}"}
    if page:
        kv = pages(page, (70, 33))
        found, wanted = (wa.attention_paged(x, kv, **tail) for x in (q, q.joined()))
    else:
        k = torch.randn(2, 70, 1, LATENT.qk).bfloat16()
        found, wanted = (wa.attention(x, k, k[..., :L], **tail) for x in (q, q.joined()))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and wanted[0].isfinite().all()


@pytest.mark.full
@pytest.mark.parametrize("arch", drawn(["sm90", "sm100"], ["sm90"]))
def test_over_latents_of_8_bits(arch):
    torch.manual_seed(0)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    latents = torch.randn(4, 64, 1, L).to(torch.float8_e4m3fn)
    rope = torch.randn(4, 64, 1, 64).bfloat16()
    kv = wa.LatentPages(latents, rope, table, torch.tensor([100, 40], dtype=torch.int32), scale=torch.tensor(0.5))
    q = as_engines_have_them(2, 1, 16)
    tail = {"mask": wa.Causal(), "scale": SCALE, "backend": f"simulate:{arch}"}
    found, wanted = (wa.attention_paged(x, kv, **tail) for x in (q, q.joined()))
    assert torch.equal(found, wanted) and wanted.any()


@pytest.mark.full
@pytest.mark.parametrize("arch", drawn(["sm90", "sm100", "gfx942"], ["sm90"]))
def test_compiled_graphs_have_the_bits_of_other_calls(arch):
    torch.manual_seed(0)
    torch._dynamo.reset()
    tail = {"mask": wa.Causal(), "scale": SCALE, "return_lse": True, "backend": f"simulate:{arch}"}

    def step(q, table, lengths):
        kv = pages_of.with_fields(block_table=table, lengths=lengths)
        return wa.attention_paged(wa.LatentQuery(q.nope * 2, q.rope), kv, **tail)

    pages_of, q = pages(16, (40, 33)), as_engines_have_them(2, 1, 16)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for lengths in (pages_of.lengths, pages_of.lengths - 7):
        found, wanted = compiled(q, pages_of.block_table, lengths), step(q, pages_of.block_table, lengths)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and wanted[0].any()


def test_queries_that_kernels_cannot_read_where_they_are():
    kv, q = pages(16, (20,)), as_engines_have_them(1, 1, 16)
    odd = torch.empty(1, 1, 16, 68).bfloat16()[..., 2:66].copy_(q.rope)
    cases = {
        "q.rope has strides .* others multiples of 8 elements": (wa.LatentQuery(q.nope, odd), kv),
        "q has 128 columns and a rotary part of 64": (wa.LatentQuery(q.rope.repeat(1, 1, 1, 2), q.rope), narrow(kv)),
        "q has 500 columns and a rotary part of 76": (
            wa.LatentQuery(q.nope[..., :500], torch.zeros(1, 1, 16, 80).bfloat16()[..., :76]), kv
        ),
    }  # fmt: skip
    for words, (query, cache) in cases.items():
        with pytest.raises(AttentionError, match=words):
            wa.attention_paged(query, cache, backend="simulate:sm90")


def narrow(kv: wa.PagedKV) -> wa.PagedKV:
    """Keys of 192 columns and values of 128."""
    return wa.PagedKV(kv.k_pages[..., :192], kv.k_pages[..., :128], kv.block_table, kv.lengths)


RAGGED = {"two": (64, (2, 0, 1), 40, True, False), "one": (16, (1, 3, 16), 16, False, False),
          "8-bit": (64, (3, 1, 1), 16, True, True), "odd-pages": (3, (1, 2, 0), 16, False, False)}  # fmt: skip
ARCHS = ("sm90", "sm100", "gfx942", "gfx950")
STEPS = {f"{arch}-{name}": (arch, name) for arch in ARCHS for name in RAGGED if name != "8-bit" or "sm" in arch}


@pytest.mark.parametrize("case", drawn(STEPS, ["sm100-two"]))
def test_requests_with_different_numbers_of_tokens(case):
    """Up to 16 each, over pages."""
    torch.manual_seed(0)
    arch, name = STEPS[case]
    page, tokens, heads, parts, narrow = RAGGED[name]
    kv = pages(page, (70, 33, 50))
    if narrow:
        clean = kv.k_pages.nan_to_num()
        latents, rope = clean[..., :L].to(torch.float8_e4m3fn), clean[..., L:].contiguous()
        kv = wa.LatentPages(latents, rope, kv.block_table, kv.lengths, scale=torch.tensor(0.5))
    both = as_engines_have_them(1, sum(tokens), heads)
    q = wa.LatentQuery(both.nope[0], both.rope[0])
    seq = wa.Ragged(torch.tensor([0, *tokens]).cumsum(0).int(), max_q=max(tokens))
    tail = {"mask": wa.Causal(), "scale": SCALE, "return_lse": True}
    found = wa.attention_paged(q if parts else q.joined(), kv, seq, **tail, backend=f"simulate:{arch}")
    for one, wanted in zip(found, wa.attention_paged(q, kv, seq, **tail), strict=True):
        assert (one.float() - wanted.float()).abs().max() < 2e-2 * wanted.float().abs().max()
