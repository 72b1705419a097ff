"""Hopper decode over 8-bit keys and values in the simulator: right values, no findings, needed synchronisation."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn, in_turn
from tests.sim.knocking import knocked_out, reviewed
from tests.sim.sm90.decode import Decode, check, run, tensors
from tests.sim.sm90.decoding.test_decode import MIXED, SCHEDULES
from tests.sim.sm90.decoding.test_decode_knockout import REDUNDANT
from warpattn.api import attention, attention_paged
from warpattn.errors import AttentionError
from warpattn.masks import Causal, SlidingWindow
from warpattn.quantized import quantize
from warpattn.scores import SoftCap
from warpattn.sequences import PagedKV, Ragged
from warpattn.sim import Report

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAGED = Decode((300, 130, 0), page=64, dim=128, heads=8, heads_kv=2, stored=E4M3, behind=True)
SHORT = Decode(
    MIXED, page=16, heads=8, heads_kv=2, tokens=4, mask=Causal(), stored=E5M2, dtype=torch.float16, per=("tensor", None)
)
CASES = {
    "paged": PAGED,
    "dense": Decode((300, 300), heads=8, heads_kv=2, dim=128, stored=E4M3),
    "head-dim-64-e5m2-fp16": SHORT,
    "head-dim-256": Decode((200, 70), page=48, dim=256, tokens=2, mask=SlidingWindow(70), stored=E4M3),
    "odd-dims": Decode((200, 70), page=8, heads=8, heads_kv=2, dim=80, dim_v=48, tokens=3, mask=Causal(), stored=E4M3,
                       per=(None, "head"), sinks=True, score=SoftCap(3.0)),
    "two-row-tiles": Decode((200, 3, 90), page=32, heads=8, tokens=5, mask=Causal(), stored=E4M3),
    "tokens": Decode(MIXED, page=16, dim=128, heads=8, heads_kv=2, stored=E4M3, per=("token", "token"), sinks=True),
    "tokens-dense": Decode((300, 300), heads=8, heads_kv=2, tokens=2, mask=Causal(), stored=E4M3, per=("head", "token"),
                           dtype=torch.float16),
    "rows": Decode((300, 300), heads=8, heads_kv=2, tokens=2, mask=Causal(), stored=E4M3, per=("64 rows", "token")),
    "columns": Decode(MIXED, page=16, dim=128, heads=8, heads_kv=2, stored=E4M3, per=(64, 64), sinks=True, tokens=2,
                      mask=Causal()),
    "columns-of-keys": Decode((300, 300), heads=8, heads_kv=2, dim=192, dim_v=128, stored=E5M2, per=(64, "token"),
                              dtype=torch.float16),
    "columns-of-values": Decode((200, 70), page=8, heads=16, heads_kv=4, dim=192, tokens=8, mask=SlidingWindow(70),
                                stored=E4M3, per=("tensor", 64), score=SoftCap(3.0)),
    "columns-256": Decode((200, 0, 70), page=48, dim=256, stored=E4M3, per=(128, 64), invariant=True),
    "invariant": Decode((400, 70, 130), page=64, heads=8, heads_kv=2, dim=128, invariant=True, stored=E4M3),
    "keys-ready": Decode((100, 700), page=64, heads=8, heads_kv=2, dim=128, kv_ready=True, stored=E4M3),
}  # fmt: skip


DRAWN = ("columns",)


@pytest.mark.parametrize(("name", "schedule", "seed"), in_turn(CASES, DRAWN, SCHEDULES, each=6))
def test_right_and_without_findings(name, schedule, seed):
    """Heads have scales of their own; pages of no sequence and rows after the last key are NaN."""
    check(CASES[name], programs=4, schedule=schedule, seed=seed)


def test_bf16_queries_of_any_size():
    """Rows far above and below the numbers of fp16, and one of zeros."""
    q, _, sequence, _ = tensors(PAGED)
    power = torch.tensor([2.0**60, 2.0**-60, 1.0, 0.0]).bfloat16().repeat(2)[:, None]
    for at, scale in ((0, 2.0**-60), (1, 2.0**60), (2, 0.1), (3, 1.0)):
        rows = (q * power).index_select(2, torch.tensor([at, at + 4]))
        assert rows.dtype == torch.bfloat16
        found = attention_paged(rows, sequence, scale=0.1 * scale, backend="simulate:sm90")
        expected = attention_paged(rows, sequence, scale=0.1 * scale)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.full
@pytest.mark.usefixtures("unread_scales")
def test_hidden_bytes_and_scales():
    """Bytes and scales of NaN at keys that no row sees, and one value of NaN that one of two tokens sees."""
    case = Decode((300, 130), page=64, dim=128, heads=8, heads_kv=2, tokens=2, mask=SlidingWindow(40), stored=E4M3,
                  per=("token", "token"))  # fmt: skip
    q, _, sequence, _ = tensors(case)
    expected = attention_paged(q, sequence, mask=case.mask)
    for b, length in enumerate(case.lengths):
        for t in range(length - 41):
            at = int(sequence.block_table[b, t // 64]), t % 64
            for cache in (sequence.k_pages, sequence.v_pages, sequence.k_scale, sequence.v_scale):
                cache[at] = torch.nan
    sequence.v_pages.view(torch.uint8)[int(sequence.block_table[0, 259 // 64]), 259 % 64, 1, 77] = 0x7F
    found = attention_paged(q, sequence, mask=case.mask, backend="simulate:sm90")
    seen = torch.zeros_like(found).bool()
    seen[0, 0, 4:, 77] = True
    assert found[seen].isnan().all()
    torch.testing.assert_close(found[~seen], expected[~seen], atol=2e-2, rtol=2e-2)


@pytest.mark.full
@pytest.mark.parametrize("name", drawn(["tokens", "columns"], ["tokens"]))
def test_token_scales_of_any_size(name):
    """Weights times scales from 2^-40 to 2^40 exceed fp16 many times over, and blocks of columns differ as much."""
    case = CASES[name]
    q, _, sequence, _ = tensors(case)
    power = torch.randint(-40, 40, sequence.v_scale.shape, generator=torch.Generator().manual_seed(0)).float().exp2()
    sequence = replace(sequence, v_scale=sequence.v_scale * power)
    found = attention_paged(q, sequence, backend="simulate:sm90").float().unflatten(-1, (-1, 64))
    expected = attention_paged(q, sequence).float().unflatten(-1, (-1, 64))
    assert found.isfinite().all() and expected.abs().max() > 1e9
    assert ((found - expected).abs() <= 2e-2 * expected.abs().amax(-1, keepdim=True)).all()


@pytest.mark.usefixtures("unread_scales")
def test_hidden_values_in_blocks_of_columns():
    """NaN in keys, values and scales that no row sees, and a value of NaN in the second block that one token sees."""
    case = Decode((300, 130), page=64, dim=128, heads=8, heads_kv=2, tokens=2, mask=SlidingWindow(40), stored=E4M3,
                  per=(64, 64))  # fmt: skip
    q, _, sequence, _ = tensors(case)
    expected = attention_paged(q, sequence, mask=case.mask)
    hidden = int(sequence.block_table[0, 100 // 64]), 100 % 64
    for cache in (sequence.k_pages, sequence.v_pages, sequence.k_scale, sequence.v_scale):
        cache[hidden] = torch.nan
    sequence.v_pages.view(torch.uint8)[int(sequence.block_table[0, 259 // 64]), 259 % 64, 1, 77] = 0x7F
    found = attention_paged(q, sequence, mask=case.mask, backend="simulate:sm90")
    seen = torch.zeros_like(found).bool()
    seen[0, 0, 4:, 77] = True
    assert found[seen].isnan().all()
    torch.testing.assert_close(found[~seen], expected[~seen], atol=2e-2, rtol=2e-2)


@pytest.mark.full
def test_public_calls_with_scales_of_columns():
    """Dense, ragged queries over pages, and queries of 8 bits."""
    case = replace(CASES["columns"], sinks=False, mask=Causal())
    q, _, kv, _ = tensors(case)
    near, backend = {"atol": 2e-2, "rtol": 2e-2}, "simulate:sm90"
    expected = attention_paged(q, kv, mask=case.mask)
    rows = Ragged(torch.arange(0, 2 * len(q) + 1, 2, dtype=torch.int32), max_q=2)
    found = attention_paged(q.flatten(0, 1), kv, rows, mask=case.mask, backend=backend)
    torch.testing.assert_close(found, expected.flatten(0, 1), **near)
    narrow = quantize(q, per="token")
    expected = attention_paged(narrow, kv, mask=case.mask)
    torch.testing.assert_close(attention_paged(narrow, kv, mask=case.mask, backend=backend), expected, **near)
    dense = [quantize(torch.randn(2, 40, 2, 128, generator=torch.Generator().manual_seed(i)), per=64) for i in (0, 1)]
    torch.testing.assert_close(attention(q[:2], *dense, backend=backend), attention(q[:2], *dense), **near)


@pytest.mark.full
@pytest.mark.parametrize("name", ["paged", "tokens", "columns"])
def test_it_needs_its_synchronisation(name):
    case, made = replace(CASES[name], behind=True), []
    again = ("ttng.wait_barrier", "ctx.rings.k, k_state, item, boxes", "copy_scales has waited for the slot")
    reason = reviewed([*REDUNDANT, *([again] if name != "paged" else [])])

    def once(module, schedule) -> Report:
        return run(case, 2, kernel=lambda _: module, schedule=schedule, step_limit=20_000, first_finding=True).report

    run(case, 2, kernel=lambda kernel: made.append(kernel) or kernel)
    results = knocked_out(made[0], once, reason)
    assert sum(found.noticed for found in results) > 0.8 * len(results)


def test_what_the_kernels_do_not_take():
    """Each reason is one sentence; nothing is dequantised instead."""
    x = torch.zeros(4, 16, 2, 64)
    table, lengths = torch.zeros(2, 2).int(), torch.ones(2).int()
    q = torch.zeros(2, 1, 4, 64).bfloat16()

    def refused(message: str, values, q=q, per="tensor", seq=None) -> None:
        made = quantize(values, per=per) if isinstance(values, torch.Tensor) else values
        kv = PagedKV(made.values, made.values, table, lengths, k_scale=made.scale, v_scale=made.scale)
        with pytest.raises(AttentionError, match=message):
            attention_paged(q, kv, seq, backend="simulate:sm90")

    fnuz = quantize(x, torch.float8_e4m3fnuz)
    refused("float8_e4m3fnuz; with 8 bits the sm90 backend takes torch.float8_e4m3fn, torch.float8_e5m2", fnuz)
    wide = quantize(torch.zeros(4, 16, 2, 128), per=64)
    many = torch.zeros(2, 17, 4, 128).half()
    refused("q up to 17 tokens .* block of columns, which fp16 operands cannot hold, the sm90 .* most 16", wide, q=many)
    half = torch.zeros(2, 17, 4, 64).half()
    refused("up to 17 tokens a sequence; with scales of v per token", x, q=half, per="token")
    refused("the page size is 3; with 8 bits the sm90 backend takes multiples of 8", x[:, :3])
    many = quantize(torch.zeros(2, 600, 2, 64))
    with pytest.raises(AttentionError, match="8-bit keys and values have no backward"):
        attention(q.clone().requires_grad_(), many, many, backend="simulate:sm90")
