"""8-bit keys and values on a card: calls, plans, a captured graph and appended rows against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import warpattn as wa
from tests.cases import Case
from tests.eight_bit import in_eight_bits
from tests.sim.sm90.decode import Decode, tensors
from tests.specials import attend as special_attend
from warpattn.quantized import quantize

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LENGTHS = (4000, 1, 0, 129, 64, 8191)
CASES = {
    "paged": Decode(LENGTHS, page=16, heads=32, heads_kv=8, dim=128, stored=E4M3),
    "tensor-e5m2": Decode(LENGTHS, page=64, heads=16, heads_kv=2, dim=128, stored=E5M2, per=("tensor", None),
                          dtype=torch.float16),
    "tokens": Decode(LENGTHS, page=16, heads=32, heads_kv=8, dim=128, stored=E4M3, per=("token", "token"), tokens=2),
    "head-dim-64": Decode(LENGTHS, page=16, heads=64, heads_kv=8, dim=64, stored=E4M3),
    "head-dim-256": Decode(LENGTHS, page=32, heads=16, heads_kv=8, dim=256, stored=E4M3),
    "many-rows": Decode(LENGTHS, page=16, heads=32, heads_kv=2, dim=128, tokens=5, stored=E4M3),
    "dense": Decode((4096, 4096, 4096), heads=32, heads_kv=8, dim=128, stored=E4M3, per=("token", "head")),
    "columns": Decode(LENGTHS, page=16, heads=32, heads_kv=8, dim=128, stored=E4M3, per=(64, 64), tokens=2),
    "columns-256": Decode(LENGTHS, page=32, heads=16, heads_kv=8, dim=256, stored=E4M3, per=(128, 64)),
    "columns-192": Decode((4096, 4096), heads=32, heads_kv=8, dim=192, dim_v=128, stored=E4M3, per=(64, "token")),
    "few-dense-keys": Decode((100, 100), heads=8, heads_kv=8, dim=128, stored=E4M3),
}  # fmt: skip


def on_card(case: Decode) -> tuple[Tensor, wa.PagedKV | tuple[wa.Quantized, wa.Quantized]]:
    """q, and the pages or a pair of dense keys and values."""
    q, (k, v), sequence, _ = tensors(case)
    own = {name: x.cuda() for name, x in vars(sequence).items() if isinstance(x, Tensor)}
    if isinstance(sequence, wa.PagedKV):
        return q.cuda(), wa.PagedKV(**own)
    return q.cuda(), (wa.Quantized(k.cuda(), own["k_scale"]), wa.Quantized(v.cuda(), own["v_scale"]))


def attend(
    q: Tensor | wa.Quantized, kv: wa.PagedKV | tuple[wa.Quantized, wa.Quantized], backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    tail = {"mask": wa.Causal(), "return_lse": True, "backend": backend}
    return wa.attention_paged(q, kv, **tail) if isinstance(kv, wa.PagedKV) else wa.attention(q, *kv, **tail)


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    out, lse = expected
    limit = (2e-2 if out.dtype == torch.bfloat16 else 3e-3) * max(1.0, out.float().abs().max().item())
    assert (found[0].float() - out.float()).abs().max() <= limit
    torch.testing.assert_close(found[1], lse, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_calls_and_plans(name):
    """Twice, so that the second call takes the short way; the same bits each time, and by a plan."""
    q, kv = on_card(CASES[name])
    found, again = attend(q, kv), attend(q, kv)
    check(found, attend(q, kv, "reference"))
    plan = wa.DecodePlan(q, kv, mask=wa.Causal(), return_lse=True)
    for other in (again, plan(q, kv)):
        assert torch.equal(other[0], found[0]) and torch.equal(other[1], found[1])


COPIED = {
    "paged": replace(CASES["paged"], tokens=600),
    "tensor-e5m2": replace(CASES["tensor-e5m2"], tokens=300),
    "head-dim-64": replace(CASES["head-dim-64"], tokens=300, page=8),
    "head-dim-256": replace(CASES["head-dim-256"], tokens=700),
    "two-parts": Decode((4000, 700), page=48, heads=16, heads_kv=2, dim=192, dim_v=80, tokens=600, stored=E4M3),
    "dense": replace(CASES["dense"], tokens=1000, per=("tensor", "head")),
}


@pytest.mark.parametrize("name", COPIED)
def test_prefill_over_16_bit_copies(name):
    """Many rows see each key: a call, a repeated one, a graph that serves other lengths, ragged queries."""
    case = COPIED[name]
    q, kv = on_card(case)
    found, again = attend(q, kv), attend(q, kv)
    check(found, attend(q, kv, "reference"))
    assert torch.equal(again[0], found[0]) and torch.equal(again[1], found[1])
    if isinstance(kv, wa.PagedKV):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = attend(q, kv)
        kv.lengths.copy_(kv.lengths * 3 // 4)
        graph.replay()
        check(captured, attend(q, kv, "reference"))
        rows = torch.tensor([case.tokens, 1, *[0] * (len(q) - 2)], dtype=torch.int32, device="cuda")
        seq = wa.Ragged(torch.cat([rows.new_zeros(1), rows.cumsum(0).int()]))
        step = q.flatten(0, 1)[: case.tokens + 1]
        results = [wa.attention_paged(step, kv, seq, mask=wa.Causal(), return_lse=True, backend=backend)
                   for backend in ("auto", "reference")]  # fmt: skip
        check(*results)


@pytest.mark.parametrize("per", ["head", "token"])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("name", ["paged", "tensor-e5m2", "dense"])
def test_queries_of_8_bits(name, tokens, per):
    """In decode and prefill, over pages and dense keys; over pages also laid end to end."""
    case = CASES[name]
    wide, kv = on_card(replace(case, tokens=tokens))
    q = wa.quantize(wide.float(), case.stored, per=per)
    found, again = attend(q, kv), attend(q, kv)
    check(found, attend(q, kv, "reference"))
    assert torch.equal(again[0], found[0]) and torch.equal(again[1], found[1])
    if isinstance(kv, wa.PagedKV):
        rows = wa.Quantized(q.values.flatten(0, 1), q.scale if per == "head" else q.scale.flatten(0, 1))
        seq = wa.Ragged(torch.arange(len(LENGTHS) + 1).int().cuda() * tokens)
        results = [wa.attention_paged(rows, kv, seq, mask=wa.Causal(), return_lse=True, backend=backend)
                   for backend in ("auto", "reference")]  # fmt: skip
        check(*results)


def test_a_graph_serves_other_scales():
    q, kv = on_card(CASES["tokens"])
    plan = wa.DecodePlan(q, kv, mask=wa.Causal(), return_lse=True)
    plan(q, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = plan(q, kv)
    kv.k_scale.mul_(0.5)
    kv.v_scale.mul_(2.0)
    kv.lengths.clamp_(max=100)
    graph.replay()
    check(found, attend(q, kv, "reference"))


@pytest.mark.parametrize("per", ["head", "token", 64])
def test_appended_rows_are_attended(per):
    """Rows that one launch quantised are as torch stores them, and a step of ragged queries reads them."""
    torch.manual_seed(0)
    k, v = (torch.randn(6, 8, 128).bfloat16() for _ in range(2))
    slots = torch.tensor([35, 36, -1, 64, 65, 80])
    pages = [torch.zeros(8, 16, 8, 128).to(E4M3) for _ in range(2)]
    shape = {"head": (8,), "token": (8, 16, 8), 64: (8, 16, 8, 2)}[per]
    scales = [torch.full(shape, 0.01 if per == "head" else 1.0) for _ in range(2)]
    here = [x.cuda() for x in (*pages, *scales)]
    wa.append_slots(k, v, *pages, slots, k_scale=scales[0], v_scale=scales[1])
    for _ in range(2):
        wa.append_slots(k.cuda(), v.cuda(), here[0], here[1], slots.cuda(), k_scale=here[2], v_scale=here[3])
    for a, b in zip((*pages, *scales), here, strict=True):
        assert (a.float() - b.cpu().float()).abs().max() <= 1e-6 * a.float().abs().max()
    table = torch.tensor([[2, 0], [4, 5]]).int().cuda()
    kv = wa.PagedKV(here[0], here[1], table, torch.tensor([5, 17]).int().cuda(), k_scale=here[2], v_scale=here[3])
    seq = wa.Ragged(torch.tensor([0, 2, 5]).int().cuda(), max_q=3)
    q = torch.randn(5, 32, 128).bfloat16().cuda()
    plan, found = wa.StepPlan(q, kv, seq, mask=wa.Causal()), wa.attention_paged(q, kv, seq, mask=wa.Causal())
    expected = wa.attention_paged(q, kv, seq, mask=wa.Causal(), backend="reference")
    assert torch.equal(plan(q, kv, seq), found)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("per", "dim", "dtype"),
    [("tensor", 128, torch.bfloat16), ("token", 128, torch.bfloat16), ("head", 64, torch.float16),
     ("tensor", 256, torch.bfloat16)],
)
def test_steps_over_a_workspace(per, dim, dtype):
    """A graph serves steps whose prompts have copies, have none since the workspace is full, or are short."""
    torch.manual_seed(0)
    batch, width = 6, 100
    k, v = (wa.quantize(torch.randn(batch * width, 16, 8, dim), per=per) for _ in range(2))
    pages, scales = [x.values.cuda() for x in (k, v)], [x.scale.cuda() for x in (k, v)]
    table = torch.randperm(batch * width).int().view(batch, width).cuda()
    kv = wa.PagedKV(*pages, table, torch.zeros(batch).int().cuda(), k_scale=scales[0], v_scale=scales[1])
    workspace = torch.full((20 * 128 * 8 * dim * 4,), 255, dtype=torch.uint8, device="cuda")  # 20 places, full of NaN
    q = torch.randn(2000, 32, dim, dtype=dtype).cuda()
    seq = wa.Ragged(torch.zeros(batch + 1).int().cuda())
    plan = wa.StepPlan(q, kv, seq, mask=wa.Causal(), workspace=workspace)
    plan(q, plan.kv, plan.seq)
    graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(q)
    with torch.cuda.graph(graph):
        plan(q, plan.kv, plan.seq, out)
    steps = [
        ((600, 1, 0, 700, 40, 300), (1600, 90, 20, 700, 1000, 1500)),  # 13 places, 6, and too many
        ((1, 2, 3, 4, 5, 6), (1600, 1, 20, 700, 1000, 1500)),
        ((1400, 600), (1590, 1000)),
        ((2000,), (1000,)),  # rows before the first key
    ]
    for queries, keys in steps:
        cu_q = torch.tensor([0, *queries]).cumsum(0).int()
        plan.update(cu_q, torch.tensor(keys).int(), table[: len(keys)])
        graph.replay()
        rows = slice(0, int(cu_q[-1]))
        real = kv.with_fields(block_table=table[: len(keys)], lengths=torch.tensor(keys).int().cuda())
        given = (q[rows], real, wa.Ragged(cu_q.cuda()))
        torch.testing.assert_close(plan(*given), out[rows], rtol=0, atol=0)
        expected = wa.attention_paged(*given, mask=wa.Causal(), backend="reference")
        torch.testing.assert_close(out[rows], expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_products_of_8_bits(dim):
    """Dense and ragged, each twice: the second call takes the short way, and has the same bits."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (wa.quantize(torch.randn(2, 1000, heads, dim, device="cuda", generator=generator), per="head")
               for heads in (8, 2, 2))  # fmt: skip
    out = torch.empty(q.values.shape, device="cuda")
    _, lse = wa.attention(q, k, v, mask=wa.Causal(), return_lse=True, out=out, backend="reference")
    flat = [wa.Quantized(x.values.flatten(0, 1), x.scale) for x in (q, k, v)]
    seq = wa.Ragged(torch.tensor([0, 1000, 2000], dtype=torch.int32, device="cuda"))
    for _ in range(2):
        found, found_lse = wa.attention(q, k, v, mask=wa.Causal(), return_lse=True)
        assert (found.float() - out).norm() <= 3.5e-2 * out.norm()
        torch.testing.assert_close(found_lse, lse, atol=1e-3, rtol=1e-4)
        assert torch.equal(wa.attention_varlen(*flat, seq, mask=wa.Causal()), found.flatten(0, 1))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_values_that_come_transposed(dim):
    """As torch makes them; attention has the bits that it has without, in a repeated call on other tensors, too."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    for _ in range(2):
        q, k, x = (torch.randn(2, 1001, heads, dim, device="cuda", generator=generator).bfloat16()
                   for heads in (8, 2, 2))  # fmt: skip
        v, expected = (make(x, per="head", transposed=True) for make in (wa.quantize, quantize))
        for found, wanted in ((v.values, expected.values), (v.transposed, expected.transposed)):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        q, k, plain = (wa.quantize(each, per="head") for each in (q, k, x))
        assert torch.equal(wa.attention(q, k, v, mask=wa.Causal()), wa.attention(q, k, plain, mask=wa.Causal()))


STORED = [("head",) * 3, ("64 rows", "head", "64 rows"), ("head",) * 2, ("token",) * 3, (64, 64)]


@pytest.mark.parametrize("mask", ["causal", "window", "padding"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("stored", STORED)
def test_values_that_a_row_does_not_see_do_not_reach_it(stored, dim, mask):
    """In products of 8 bits, and where tiles become 16-bit ones."""
    case = Case(seq_q=300, seq_k=333, dim=dim, dtype=torch.bfloat16, mask=mask)
    inputs = case.build("cuda")
    inputs.v[:, 320:], inputs.v[:, 120, :, 3] = torch.nan, torch.nan
    x = in_eight_bits(inputs, stored, E4M3)
    (out, _), (expected, _) = special_attend(x, "auto"), special_attend(x, "reference")
    assert torch.equal(out.isnan(), expected.isnan()) and expected.isnan().any() and expected.isfinite().any()
    out, expected = out.float().nan_to_num(), expected.float().nan_to_num()
    assert (out - expected).norm() <= 3.5e-2 * expected.norm()


@pytest.mark.parametrize("per", ["tensor", "head", "token", 64])
def test_values_that_kernels_make(per):
    """As torch makes them; the second call writes addresses alone. With a given scale, too."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    for _ in range(2):
        x = torch.randn(3, 1001, 6, 128, device="cuda", generator=generator).bfloat16() * 30
        for scale in (None, wa.quantize(x.cpu(), per=per).scale.cuda()):
            found, expected = wa.quantize(x, per=per, scale=scale), quantize(x, per=per, scale=scale)
            assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
            assert torch.equal(found.scale, expected.scale)
