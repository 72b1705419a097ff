"""Latent attention inside of torch.compile(fullgraph=True): queries in two tensors, latents of 8 bits, gradients."""

import pytest
import torch
from torch import Tensor

import warpattn as wa
from tests.drawn import left_out
from tests.unit.api.latent.test_latent_query import CU, LENGTHS, TABLE, L, R, drawn, query
from warpattn.quantized import saturated
from warpattn.runtime.torch_op import operators, program

KEYS, ROWS, CACHE = drawn(2, 9, 1, L + R), drawn(9, 1, L + R), drawn(5, 16, 1, L + R)
LATENTS, ROTARY = saturated(drawn(5, 16, 1, L), torch.float8_e4m3fn), drawn(5, 16, 1, R)
CU_K, SCALE = torch.tensor([0, 5, 9], dtype=torch.int32), torch.tensor(0.5)
OUTSIDE = wa.LatentPages(LATENTS, ROTARY, TABLE, LENGTHS, scale=SCALE)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def pages(table: Tensor = TABLE, lengths: Tensor = LENGTHS) -> wa.PagedKV:
    return wa.PagedKV(CACHE, CACHE[..., :L], table, lengths)


def latents(table: Tensor = TABLE, lengths: Tensor = LENGTHS) -> wa.LatentPages:
    return wa.LatentPages(LATENTS, ROTARY, table, lengths, scale=SCALE)


CALLS = {
    "dense": (lambda q: wa.attention(q, KEYS, KEYS[..., :L], mask=wa.Causal(), return_lse=True), (2, 3)),
    "varlen": (lambda q: wa.attention_varlen(q, ROWS, ROWS[..., :L], wa.Ragged(CU, CU_K)), (4,)),
    "pages": (lambda q: wa.attention_paged(q, pages(), mask=wa.Causal(), return_lse=True), (2, 3)),
    "ragged pages": (lambda q: wa.attention_paged(q, pages(), wa.Ragged(CU, max_q=3), mask=wa.Causal()), (4,)),
    "8 bits": (lambda q: wa.attention_paged(q, latents(), mask=wa.Causal(), return_lse=True), (2, 3)),
    "8 bits, ragged": (lambda q: wa.attention_paged(q, latents(), wa.Ragged(CU), mask=wa.Causal()), (4,)),
    "8 bits, from outside": (lambda q: wa.attention_paged(q, OUTSIDE, wa.Ragged(CU)), (4,)),
}


# The tests below compile the others, too.
KEPT = ("varlen", "8 bits")


@pytest.mark.parametrize("name", [name if name in KEPT else left_out(name) for name in CALLS])
def test_compiled_calls_have_the_bits_of_others(name):
    call, axes = CALLS[name]
    forms = [lambda q: call(q), lambda q: call(wa.LatentQuery(q.nope * 1, q.rope)), lambda q: call(q.joined())]
    for form in forms:
        compiled = torch.compile(form, fullgraph=True, backend="aot_eager")
        for seed in (1, 5):
            q = query(*axes, seed=seed)
            torch.testing.assert_close(compiled(q), call(q), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [pages, latents])
def test_lengths_and_tables_may_change(kind):
    q = query(2, 3)
    compiled = torch.compile(lambda *x: wa.attention_paged(q, kind(*x)), fullgraph=True, backend="aot_eager")
    for table, lengths in ((TABLE, LENGTHS), (TABLE.flip(0), LENGTHS - 14)):
        assert torch.equal(compiled(table, lengths), wa.attention_paged(q, kind(table, lengths)))


@pytest.mark.parametrize("name", ["dense", "varlen", "pages", "ragged pages"])
def test_gradients_reach_both_parts(name):
    call, axes = CALLS[name]

    def gradients(form):
        parts = [x.detach().requires_grad_() for x in (query(*axes).nope, query(*axes).rope)]
        out = form(wa.LatentQuery(*parts))
        return torch.autograd.grad((out[0] if isinstance(out, tuple) else out).square().sum(), parts)

    found = gradients(torch.compile(lambda q: call(q), fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(found, gradients(call))
    assert all(x.abs().max() > 0 for x in found)


@pytest.mark.parametrize("kind", [pages, latents])
def test_text_says_which_tensors_there_are(kind):
    kv = kind().with_fields(q_rope=query(2, 3).rope)
    layout = (kv.kind, kv.bounds(), tuple(kv.indices()))
    again = program.sequence_of(layout, kv.k_pages, kv.v_pages, list(kv.indices().values()))
    assert type(again) is type(kv) and list(again.indices()) == list(kv.indices())
    assert all(mine is its for mine, its in zip(again.indices().values(), kv.indices().values(), strict=True))


def test_the_operator_keeps_its_promises():
    q = query(2, 3)
    kv = pages().with_fields(q_rope=q.rope.clone().requires_grad_())
    text = repr((wa.Causal().program().key, None, (0.25, True, "auto", None), (kv.kind, (), tuple(kv.indices()))))
    inputs = (q.nope, kv.k_pages, kv.v_pages, None, list(kv.indices().values()), [], [], text)
    torch.library.opcheck(operators._attention, inputs)


def test_what_the_graph_cannot_see_is_refused_when_it_runs():
    odd = drawn(5, 16, 1, R + 1)[..., 1:]
    call = torch.compile(
        lambda q: wa.attention_paged(q, wa.LatentPages(LATENTS, odd, TABLE, LENGTHS)), fullgraph=True, backend="eager"
    )
    with pytest.raises(wa.AttentionError, match="its rows must be in one piece and start at multiples of 16 bytes"):
        call(query(2, 3))
    wrong = torch.compile(lambda q: wa.attention(q, KEYS, KEYS[..., :L]), fullgraph=True, backend="eager")
    with pytest.raises(wa.AttentionError, match=r"q\.rope has shape .* it must have those of q but for the columns"):
        wrong(wa.LatentQuery(query(2, 3).nope, query(2, 2).rope))
