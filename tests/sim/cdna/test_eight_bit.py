"""CDNA kernels over 8-bit keys and values in the simulator: values, scales, formats, every schedule."""

from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from tests.drawn import drawn, each_once
from tests.sim.cdna.calls import (
    ARCHS,
    E4M3,
    E5M2,
    SCHEDULES,
    Case,
    check,
    decode_choice,
    in_eight_bits,
    paged,
    ragged,
    ready_of,
    simulated,
)
from warpattn.api import attention, attention_paged
from warpattn.errors import AttentionError
from warpattn.kernels.cdna.select import choose
from warpattn.masks import Causal, Document, SlidingWindow
from warpattn.problem import Call
from warpattn.problem.arch import ARCHS as TARGETS
from warpattn.quantized import Quantized, quantize
from warpattn.scores import ALiBi, SoftCap
from warpattn.sequences import PagedKV

both = pytest.mark.parametrize("arch", ARCHS)
HALF = torch.float16
CASES = {
    "prefill": lambda: Case(140, 200, heads=4, heads_kv=2, dim=128, mask=Causal(), sinks=True).call(),
    "prefill-fp16": lambda: Case(40, 300, dim=64, mask=SlidingWindow(70), dtype=HALF).call(),
    "prefill-odd-dims": lambda: paged(Case(40, 1, dim=80, mask=Causal(), score=SoftCap(3.0)), [70, 0, 130], 3),
    "prefill-256": lambda: Case(40, 150, dim=256, mask=Causal()).call(),
    "ragged": lambda: ragged(Case(1, 1, heads=4, heads_kv=2, mask=Causal()), [30, 70, 0], [90, 70, 10]),
    "decode": lambda: Case(2, 300, heads=4, heads_kv=2, dim=128, batch=2, mask=Causal(), sinks=True).call(),
    "decode-odd-dims": lambda: Case(3, 300, heads=4, dim=80, dim_v=48, score=ALiBi(4)).call(),
    "decode-256": lambda: paged(Case(1, 1, heads=8, heads_kv=2, dim=256), [150, 70], 48),
    "pages": lambda: paged(Case(2, 1, heads=4, heads_kv=2, dim=128, mask=Causal(), sinks=True), [70, 0, 300], 16),
    "whole-pages": lambda: paged(Case(40, 1, heads=2, dim=128, mask=Causal()), [70, 0, 300], 64),
}
SCALES = (("tensor", "head"), ("token", "token"), ("head", "token"), ("token", "tensor"))


def stored(name: str, arch: str, per: tuple[str | int, str | int] = SCALES[0], formats: dict = E4M3) -> Call:
    torch.manual_seed(1)
    return in_eight_bits(CASES[name](), formats[arch], per)


SOME = ("prefill-fp16", "whole-pages", "decode-odd-dims")


@pytest.mark.parametrize(("name", "arch"), drawn(product(CASES, ARCHS), each_once(SOME, ARCHS)))
def test_values(name, arch):
    """With scales of a tensor and of heads, under every schedule; pages of no sequence are NaN."""
    for schedule in SCHEDULES:
        check(stored(name, arch), arch, schedule=schedule)


TOKENS = [name for name in CASES if "fp16" not in name]


OF_TOKENS = (TOKENS, SCALES[1:], ARCHS)


# The other cases are those of `test_values`.
WITH_TOKENS = [("decode", SCALES[1], "gfx950")]


@pytest.mark.parametrize(("name", "per", "arch"), drawn(product(*OF_TOKENS), WITH_TOKENS))
def test_scales_of_tokens(name, per, arch):
    """Of keys, of values and of both."""
    check(stored(name, arch, per), arch, schedule="adversarial")


COLUMNS = {
    "prefill": (64, 64),
    "prefill-fp16-128": (64, "head"),
    "prefill-192": (64, 64),
    "prefill-256": (128, 64),
    "ragged-128": ("token", 64),
    "decode": (64, 64),
    "decode-256": (128, 128),
    "pages": (64, "head"),
    "whole-pages": ("tensor", 64),
    "odd-pages": (64, 64),
    "rows": ("64 rows", 64),
    "few-rows": ("128 rows", "token"),
}
WITH_COLUMNS = ("ragged-128", "decode-256")
CASES |= {
    "prefill-fp16-128": lambda: Case(40, 300, dim=128, mask=SlidingWindow(70), dtype=HALF).call(),
    "prefill-192": lambda: Case(40, 90, dim=192, dim_v=128, mask=Causal(), score=SoftCap(3.0)).call(),
    "ragged-128": lambda: ragged(Case(1, 1, heads=4, heads_kv=2, dim=128, mask=Causal()), [30, 70, 0], [90, 70, 10]),
    "rows": lambda: Case(40, 300, heads=4, heads_kv=2, dim=128, batch=2, mask=Causal()).call(),
    "few-rows": lambda: Case(2, 300, heads=4, heads_kv=2, dim=128, batch=2, mask=Causal()).call(),
    "odd-pages": lambda: paged(Case(1, 1, heads=2, dim=256, mask=Causal()), [70, 0, 130], 5),
}


@pytest.mark.parametrize(("name", "arch"), drawn(product(COLUMNS, ARCHS), each_once(WITH_COLUMNS, ARCHS)))
def test_scales_of_columns(name, arch):
    """Of blocks of a key's columns, of a value's, and of both."""
    check(stored(name, arch, COLUMNS[name]), arch, schedule="adversarial")


OTHERS = ("prefill-fp16", "decode")


@pytest.mark.full
@pytest.mark.parametrize(("name", "arch"), drawn(product(OTHERS, ARCHS), each_once(OTHERS, ARCHS)[1:]))
def test_the_other_format(name, arch):
    check(stored(name, arch, formats=E5M2), arch)


@pytest.mark.parametrize(("partitions", "arch"), drawn(product((1, 7), ARCHS), [(7, "gfx950")]))
def test_partitions(arch, partitions):
    call = stored("decode", arch, ("token", "token"))
    check(call, arch, decode_choice(call, arch, partitions))


@pytest.mark.parametrize("arch", drawn(ARCHS, ["gfx950"]))
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0**-120])
def test_softmax_scales(arch, scale):
    """Below 0, 0, and one whose product with the keys' is no normal number."""
    check(replace(stored("decode", arch), scale=scale), arch)


FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
OF_FORMATS = (list(FORMATS), (torch.bfloat16, HALF), ARCHS)


@pytest.mark.parametrize(
    ("name", "dtype", "arch"),
    drawn(product(*OF_FORMATS), [(*pair, arch) for pair in each_once(*OF_FORMATS[:2]) for arch in ARCHS]),
)
def test_every_number_of_the_format(name, dtype, arch):
    """One key a sequence, so the output is its value: exact for all 256 bytes, and NaN where they are."""
    stored_as = FORMATS[name][arch]
    v = torch.arange(256, dtype=torch.uint8).view(stored_as).reshape(1, 1, 2, 128)
    q, k = torch.zeros(1, 1, 2, 128, dtype=dtype), torch.zeros(1, 1, 2, 128).to(stored_as)
    found = attention(q, k, v, backend=f"simulate:{arch}")
    assert found.dtype == dtype
    expected = v.float().masked_fill(~v.float().isfinite(), torch.nan)  # what is no number spoils its own column
    special = ~v.float().isfinite()
    assert torch.equal(found.float()[~special], expected[~special])
    assert torch.equal(found.float()[special].isnan(), v.float()[special].isnan())


PER = ("token", 64)


@pytest.mark.usefixtures("unread_scales")
@pytest.mark.parametrize(("per", "arch"), drawn(product(PER, ARCHS), [(64, "gfx950")]))
def test_hidden_bytes_and_scales(arch, per):
    """Under a mask that reads tensors, NaN in bytes and scales that a row does not see reaches nothing of it."""
    ids = torch.arange(200)[None] // 70
    case = Case(100, 200, heads=2, dim=128, mask=Document(ids))
    call = in_eight_bits(case.call(), E4M3[arch], (per, per))
    expected = attention(call.q, *_quantized(call), mask=case.mask)
    dark = call.k.view(torch.uint8), call.v.view(torch.uint8)
    for x in dark:
        x[:, :70] = 0x80 if arch == "gfx942" else 0x7F
    for scale in (call.sequence.k_scale, call.sequence.v_scale):
        assert scale is not None
        scale[:, :70] = torch.nan
    found = attention(call.q, *_quantized(call), mask=case.mask, backend=f"simulate:{arch}")
    assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
    torch.testing.assert_close(found[:, 40:], expected[:, 40:], atol=2e-2, rtol=2e-2)


NOBODYS = [(arch, *pages) for arch in ARCHS for pages in (("pages", "token"), ("pages", 64), ("odd-pages", 64))]


@pytest.mark.parametrize(("arch", "name", "per"), drawn(NOBODYS, NOBODYS[3:4]))
def test_scales_of_nobody(arch, name, per):
    """Scales of pages that no sequence has, and of rows past the end, are NaN."""
    call = stored(name, arch, (per, per))
    kv = call.sequence
    assert isinstance(kv, PagedKV) and kv.k_scale is not None and kv.v_scale is not None
    expected = attention_paged(call.q, kv, mask=call.mask).float()
    garbage = call.k.float().isnan().all(-1)
    assert garbage.any()
    kv.k_scale[garbage] = kv.v_scale[garbage] = torch.nan
    found = attention_paged(call.q, kv, mask=call.mask, backend=f"simulate:{arch}").float()
    torch.testing.assert_close(found, expected, atol=1.6e-2, rtol=0)


def _quantized(call: Call) -> tuple[Quantized, Quantized]:
    assert call.sequence.k_scale is not None and call.sequence.v_scale is not None
    return Quantized(call.k, call.sequence.k_scale), Quantized(call.v, call.sequence.v_scale)


@pytest.mark.parametrize(("per", "arch"), drawn(product(PER, ARCHS), [(64, "gfx942")]))
def test_a_wrong_scale_is_seen(arch, per):
    """The tolerance is no wider than a tenth of a scale, of a block of columns if they have one."""
    call = stored("pages", arch, (per, per))
    report, out, lse = simulated(call, arch)
    assert report.clean and out < 1.6e-2 and lse < 1e-4
    scales = call.sequence.v_scale
    assert scales is not None
    ready = ready_of(call, arch)
    assert choose(ready.problem, TARGETS[arch]).config.eight_bit is not None
    wrong = replace(call, sequence=replace(call.sequence, v_scale=scales * torch.tensor([1.0, 1.1])))
    found, expected = (attention_paged(x.q, x.sequence, mask=x.mask, backend=name).float()
                       for x, name in ((wrong, f"simulate:{arch}"), (call, "reference")))  # fmt: skip
    assert (found - expected).abs().max() > 1.6e-2


@both
def test_what_the_kernels_do_not_take(arch):
    x = torch.zeros(4, 16, 2, 64)
    table, lengths = torch.zeros(2, 2).int(), torch.ones(2).int()
    q = torch.zeros(2, 1, 4, 64).bfloat16()

    def refused(message: str, made, q=q) -> None:
        kv = PagedKV(made.values, made.values, table, lengths, k_scale=made.scale, v_scale=made.scale)
        with pytest.raises(AttentionError, match=message):
            attention_paged(q, kv, backend=f"simulate:{arch}")

    other = E4M3["gfx950" if arch == "gfx942" else "gfx942"]
    refused(f"have dtype {other}; with 8 bits the {arch} backend takes", quantize(x, other))
    blocks = quantize(torch.zeros(4, 16, 2, 128), E4M3[arch], per=64)
    refused("which fp16 operands cannot hold", blocks, torch.zeros(2, 1, 4, 128).half())
    refused("which fp16 operands cannot hold", quantize(x, E4M3[arch], per="token"), q.half())
    odd = quantize(torch.zeros(4, 16, 2, 72), E4M3[arch])
    refused("head_dim of k is 72; with 8 bits", odd, torch.zeros(2, 1, 4, 72).half())
    values = quantize(torch.zeros(2, 600, 2, 64), E4M3[arch])
    with pytest.raises(AttentionError, match="has no kernels for 8-bit queries"):
        attention(quantize(torch.zeros(2, 4, 4, 64), E4M3[arch]), values, values, backend=f"simulate:{arch}")
