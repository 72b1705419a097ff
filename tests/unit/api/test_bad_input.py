"""Bad input: one AttentionError, raised before anything runs, that names the argument, its value and the rule.

The table has one line per mistake: what to change in a good call, and what the message must say.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warpattn.api import attention, attention_paged, attention_varlen
from warpattn.errors import AttentionError, Rules
from warpattn.masks import Causal, Chunked, CustomMask, Document, Materialized, Padding, Prefix, SlidingWindow
from warpattn.scores import ALiBi, Bias, CustomScore, SoftCap
from warpattn.sequences import PagedKV, Ragged

Change = Callable[[dict[str, Any]], Any]

B, SQ, SK, HQ, HKV, D, DV = 2, 5, 7, 4, 2, 8, 16

LISTED = '"auto", "reference", "sm90", "sm100", "gfx942", "gfx950", "simulate:sm90"'


def dense() -> dict[str, Any]:
    """A good call of `attention`."""
    return {"q": torch.randn(B, SQ, HQ, D), "k": torch.randn(B, SK, HKV, D), "v": torch.randn(B, SK, HKV, DV)}


def ragged() -> dict[str, Any]:
    """A good call of `attention_varlen`: lengths 2, 3 and 4, 3."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 4, 7]))
    return {
        "q": torch.randn(5, HQ, D),
        "k": torch.randn(7, HKV, D),
        "v": torch.randn(7, HKV, DV),
        "seq": Ragged(cu_q, cu_k),
    }


def paged() -> dict[str, Any]:
    """A good call of `attention_paged`: 4 pages of 3 keys, lengths 5 and 2, unused table entries pointing nowhere."""
    table = torch.tensor([[3, 1, 99], [0, -5, 99]], dtype=torch.int32)
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    return {
        "q": torch.randn(B, SQ, HQ, D),
        "kv": PagedKV(torch.randn(4, 3, HKV, D), torch.randn(4, 3, HKV, DV), table, lengths),
    }


def mixed() -> dict[str, Any]:
    """A good call of `attention_paged` with ragged queries: 1 and 2 of sequences of 5 and 2 keys."""
    return {"q": torch.randn(3, HQ, D), "kv": paged()["kv"], "seq": Ragged(ints(0, 1, 3), max_q=2)}


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def set_(**changes: Any) -> Change:
    """Replace arguments; a callable value is called, so that tensors are made when the test runs."""
    return lambda call: call.update({name: x() if callable(x) else x for name, x in changes.items()})


def offsets(cu_q: Any = (0, 2, 5), cu_k: Any = (0, 4, 7), **bounds: Any) -> Change:
    """Replace the offsets of a ragged call."""

    def change(call: dict[str, Any]) -> None:
        made = [ints(*x) if isinstance(x, tuple) else x for x in (cu_q, cu_k)]
        call["seq"] = Ragged(*made, **bounds)

    return change


def cache(**changes: Any) -> Change:
    """Replace tensors of the paged cache."""

    def change(call: dict[str, Any]) -> None:
        names = ("k_pages", "v_pages", "block_table", "lengths")
        kept = {name: getattr(call["kv"], name) for name in names}
        call["kv"] = PagedKV(**(kept | changes))

    return change


def tensor(*shape: int, **options: Any) -> Callable[[], torch.Tensor]:
    return lambda: torch.zeros(shape, **options)


def chosen(b, h, q, k):  # type: ignore[no-untyped-def]
    return q if q > k else k


def shifted(b, h, q, k):  # type: ignore[no-untyped-def]
    return q - k


def logged(s, b, h, q, k):  # type: ignore[no-untyped-def]
    return math.log(s)


DENSE: list[tuple[str, Change, tuple[str, ...]]] = [
    ("q a list", set_(q=[1.0]), ("q is a list", "torch.Tensor")),
    ("v a number", set_(v=2.0), ("v is a float", "torch.Tensor")),
    ("k missing", set_(k=None), ("k is None", "torch.Tensor")),
    ("q rank 3", set_(q=tensor(SQ, HQ, D)), ("q has shape (5, 4, 8)", "rank 4 (batch, seq, heads, head_dim)")),
    ("k rank 2", set_(k=tensor(SK, D)), ("k has shape (7, 8)", "rank 4")),
    ("v rank 5", set_(v=tensor(1, B, SK, HKV, DV)), ("v has shape (1, 2, 7, 2, 16)", "rank 4")),
    ("q sparse", set_(q=lambda: torch.zeros(B, SQ, HQ, D).to_sparse()), ("q has layout torch.sparse_coo", "strided")),
    ("q int", set_(q=tensor(B, SQ, HQ, D, dtype=torch.int32)), ("q has dtype torch.int32", "must be one of")),
    ("q bool", set_(q=tensor(B, SQ, HQ, D, dtype=torch.bool)), ("q has dtype torch.bool", "torch.bfloat16")),
    ("q complex", set_(q=tensor(B, SQ, HQ, D, dtype=torch.complex64)), ("torch.complex64", "must be one of")),
    ("q float8", set_(q=tensor(B, SQ, HQ, D, dtype=torch.float8_e4m3fn)), ("k has dtype", "float8_e4m3fn")),
    ("k fp16", set_(k=tensor(B, SK, HKV, D, dtype=torch.float16)), ("k has dtype torch.float16", "torch.float32")),
    ("v bf16", set_(v=tensor(B, SK, HKV, DV, dtype=torch.bfloat16)), ("v has dtype torch.bfloat16", "dtype of q")),
    ("q elsewhere", set_(q=tensor(B, SQ, HQ, D, device="meta")), ("q is on the device meta", "device of q, meta")),
    ("k elsewhere", set_(k=tensor(B, SK, HKV, D, device="meta")), ("k is on meta", "device of q, cpu")),
    ("v elsewhere", set_(v=tensor(B, SK, HKV, DV, device="meta")), ("v is on meta", "device of q, cpu")),
    ("batch 0", set_(q=tensor(0, SQ, HQ, D)), ("k has batch 2", "batch of q, 0")),
    ("batch of k", set_(k=tensor(3, SK, HKV, D)), ("k has batch 3", "batch of q, 2")),
    ("batch of v", set_(v=tensor(1, SK, HKV, DV)), ("v has batch 1", "batch of q, 2")),
    ("keys of v", set_(v=tensor(B, 6, HKV, DV)), ("v has 6 keys", "as many keys as k, 7")),
    ("one key of v", set_(v=tensor(B, 1, HKV, DV)), ("v has 1 key;", "as many keys as k, 7")),
    ("head ratio", set_(q=tensor(B, SQ, 5, D)), ("q has 5 heads and k has 2", "multiple")),
    ("more key heads", set_(q=tensor(B, SQ, 1, D)), ("q has 1 head and k has 2", "multiple")),
    ("no key heads", set_(k=tensor(B, SK, 0, D), v=tensor(B, SK, 0, DV)), ("q has 4 heads and k has 0", "multiple")),
    ("heads of v", set_(v=tensor(B, SK, 4, DV)), ("v has 4 heads", "heads of k, 2")),
    ("one head of v", set_(v=tensor(B, SK, 1, DV)), ("v has 1 head;", "heads of k, 2")),
    ("head dim of k", set_(k=tensor(B, SK, HKV, 16)), ("k has head_dim 16", "head_dim of q, 8")),
    ("head dim 0", set_(q=tensor(B, SQ, HQ, 0), k=tensor(B, SK, HKV, 0)), ("q has head_dim 0", "at least one")),
    ("v head dim 0", set_(v=tensor(B, SK, HKV, 0)), ("v has head_dim 0", "at least one")),
    ("scale nan", set_(scale=math.nan), ("scale is nan", "finite")),
    ("scale inf", set_(scale=-math.inf), ("scale is -inf", "finite")),
    ("scale text", set_(scale="0.1"), ("scale is '0.1'", "finite number")),
    ("scale bool", set_(scale=True), ("scale is True", "finite number")),
    ("scale tensor", set_(scale=tensor(1)), ("scale is a torch.float32 tensor of shape (1,)", "finite number")),
    ("mask a tensor", set_(mask=tensor(SQ, SK, dtype=torch.bool)), ("mask is a Tensor", "Materialized(tensor)")),
    ("mask a class", lambda call: call.update(mask=Causal), ("mask is the class Causal", "such as warpattn.Causal()")),
    ("mask a function", lambda call: call.update(mask=shifted), ("mask is a function", "CustomMask(function)")),
    ("mask a name", set_(mask="causal"), ("mask is a str", "Mask")),
    ("mask a score", lambda call: call.update(mask=SoftCap(1.0)), ("mask is a SoftCap", "Mask")),
    ("score a mask", lambda call: call.update(score=Causal()), ("score is a Causal", "Score")),
    ("score a tensor", set_(score=tensor(SQ, SK)), ("score is a Tensor", "Bias(tensor)")),
    ("score a number", set_(score=30.0), ("score is a float", "Score")),
    ("return_lse a number", set_(return_lse=1), ("return_lse is 1", "True or False")),
    ("backend unknown", set_(backend="cuda"), ("backend is 'cuda'", LISTED)),
    ("backend none", set_(backend=None), ("backend is None", LISTED)),
    ("backend sm90 on the CPU", set_(backend="sm90"), ("q is on cpu", "CUDA capability 9.0")),
    ("sm90 in fp32", set_(backend="sm90"), ("q has dtype torch.float32", 'backend="reference"')),
    ("sm90 head dim", set_(backend="sm90", q=tensor(B, SQ, HQ, 514), k=tensor(B, SK, HKV, 514)),
     ("q has head_dim 514", "head dims up to 512")),
    ("gfx950 on the CPU", set_(backend="gfx950"), ("q is on cpu", "an AMD gfx950")),
    ("simulated head dim", set_(backend="simulate:sm100", v=tensor(B, SK, HKV, 520)), ("head_dim 520", "up to 512")),
    ("gfx942 gradients",
     set_(backend="gfx942", q=tensor(B, SQ, HQ, 160), k=tensor(B, SK, HKV, 160, requires_grad=True)),
     ("k requires a gradient", "head dims up to 128", 'backend="reference"')),
    ("sinks a list", set_(sinks=[0.0] * HQ), ("sinks is a list", "torch.Tensor")),
    ("sinks rank", set_(sinks=tensor(1, HQ)), ("sinks has shape (1, 4)", "rank 1")),
    ("sinks per key head", set_(sinks=tensor(HKV)), ("sinks has shape (2,)", "one logit per query head, (4,)")),
    ("sinks int", set_(sinks=tensor(HQ, dtype=torch.int64)), ("sinks has dtype torch.int64", "torch.float32")),
    ("sinks elsewhere", set_(sinks=tensor(HQ, device="meta")), ("sinks is on meta", "device of q, cpu")),
    ("out a list", set_(out=[]), ("out is a list", "torch.Tensor")),
    ("out rank", set_(out=tensor(SQ, HQ, DV)), ("out has shape (5, 4, 16)", "rank 4")),
    ("out as q", set_(out=tensor(B, SQ, HQ, D)), ("out has shape (2, 5, 4, 8)", "must have shape (2, 5, 4, 16)")),
    ("out bf16", set_(out=tensor(B, SQ, HQ, DV, dtype=torch.bfloat16)), ("out has dtype torch.bfloat16", "dtype of q")),
    ("out elsewhere", set_(out=tensor(B, SQ, HQ, DV, device="meta")), ("out is on meta", "device of q, cpu")),
    ("out expanded", set_(out=lambda: torch.zeros(1, SQ, HQ, DV).expand(B, -1, -1, -1)),
     ("out has shape (2, 5, 4, 16) and strides (0,", "its own place in memory")),
    ("out with gradients", set_(out=tensor(B, SQ, HQ, DV), q=tensor(B, SQ, HQ, D, requires_grad=True)),
     ("q requires a gradient", "leave out=None")),
    ("padding batch", lambda call: call.update(mask=Padding(ints(1, 2, 3))),
     ("Padding.valid_lengths has shape (3,)", "batch axis must be 2")),
    ("padding in a combination", lambda call: call.update(mask=Causal() & ~Padding(ints(1))),
     ("Padding.valid_lengths has shape (1,)", "batch axis must be 2")),
    ("padding too long", lambda call: call.update(mask=Padding(ints(1, 8))),
     ("Padding.valid_lengths[1] is 8", "within 0 .. 7")),
    ("padding negative", lambda call: call.update(mask=Padding(ints(-1, 2))),
     ("Padding.valid_lengths[0] is -1", "within 0 .. 7")),
    ("padding elsewhere", lambda call: call.update(mask=Padding(ints(1, 2).to("meta"))),
     ("valid_lengths is a tensor that is on the device meta",)),
    ("prefix batch", lambda call: call.update(mask=Prefix(ints(1, 2, 3))),
     ("Prefix.length has shape (3,)", "batch axis must be 2")),
    ("prefix negative", lambda call: call.update(mask=Prefix(ints(1, -2))), ("Prefix.length[1] is -2", "at least 0")),
    ("document length", lambda call: call.update(mask=Document(torch.zeros(SQ, dtype=torch.int32))),
     ("Document.ids has shape (5,)", "keys axis must be 7")),
    ("document batch", lambda call: call.update(mask=Document(torch.zeros(3, SK, dtype=torch.int32))),
     ("Document.ids has shape (3, 7)", "batch axis must be 2")),
    ("matrix rows", lambda call: call.update(mask=Materialized(torch.ones(B, SK, SK, dtype=torch.bool))),
     ("Materialized.mask has shape (2, 7, 7)", "queries axis must be 5 or 1")),
    ("matrix heads", lambda call: call.update(mask=Materialized(torch.ones(B, HKV, SQ, SK, dtype=torch.bool))),
     ("Materialized.mask has shape (2, 2, 5, 7)", "query heads axis must be 4 or 1")),
    ("added matrix under or", lambda call: call.update(mask=Causal() | Materialized(torch.zeros(1, SQ, SK))), ()),
    ("slopes heads", lambda call: call.update(score=ALiBi(torch.ones(HKV))),
     ("ALiBi.slopes has shape (2,)", "query heads axis must be 4")),
    ("slopes number", lambda call: call.update(score=ALiBi(8)), ("ALiBi.slopes is 8", "that of q, 4")),
    ("bias keys", lambda call: call.update(score=SoftCap(2.0) | Bias(torch.zeros(SQ, 6))),
     ("Bias.bias has shape (5, 6)", "keys axis must be 7 or 1")),
    ("custom mask with if", lambda call: call.update(mask=CustomMask(chosen)), ("test_bad_input.py",)),
    ("custom mask not bool", lambda call: call.update(mask=CustomMask(shifted)), ("test_bad_input.py", "shifted")),
    ("custom score math.log", lambda call: call.update(score=CustomScore(logged)), ("test_bad_input.py",)),
]  # fmt: skip

RAGGED: list[tuple[str, Change, tuple[str, ...]]] = [
    ("seq a tensor", set_(seq=tensor(3, dtype=torch.int32)), ("seq is a Tensor", "Ragged")),
    ("seq paged", lambda call: call.update(seq=paged()["kv"]), ("seq is a PagedKV", "Ragged")),
    ("q dense", set_(q=tensor(B, SQ, HQ, D)), ("q has shape (2, 5, 4, 8)", "rank 3 (total, heads, head_dim)")),
    ("offsets a list", offsets([0, 2, 5]), ("seq.cu_q is a list", "torch.Tensor")),
    ("offsets int64", offsets(torch.tensor([0, 2, 5])), ("seq.cu_q has dtype torch.int64", "torch.int32")),
    ("offsets rank", offsets(ints([0, 2, 5])), ("seq.cu_q has shape (1, 3)", "rank 1")),
    ("no offsets", offsets((), ()), ("seq.cu_q has shape (0,)", "batch + 1 offsets")),
    ("no sequence, but rows", offsets((0,), (0,)), ("seq.cu_q[-1] is 0", "end at the rows it divides, 5")),
    ("offsets differ", offsets((0, 2, 5), (0, 7)), ("seq.cu_k has shape (2,)", "shape of seq.cu_q, (3,)")),
    ("start", offsets((1, 2, 5)), ("seq.cu_q[0] is 1", "start at 0")),
    ("end", offsets((0, 2, 4)), ("seq.cu_q[-1] is 4", "end at the rows it divides, 5")),
    ("end of keys", offsets(cu_k=(0, 4, 9)), ("seq.cu_k[-1] is 9", "end at the rows it divides, 7")),
    ("descending", offsets((0, 6, 5)), ("seq.cu_q[1] is 6 and seq.cu_q[2] is 5", "never descend")),
    ("keys unlike queries", offsets(cu_k=None), ("k has 7 rows", "as many as q, 5")),
    ("keys of v", set_(v=tensor(6, HKV, DV)), ("v has 6 keys", "as k, 7")),
    ("bound negative", offsets(max_q=-1), ("seq.max_q is -1", "at least 0")),
    ("bound not int", offsets(max_k=2.5), ("seq.max_k is 2.5", "None or an int")),
    ("bound too low", offsets(max_k=3), ("seq.max_k is 3", "sequence 0 has 4 rows by seq.cu_k")),
    ("offsets elsewhere", offsets(tensor(3, dtype=torch.int32, device="meta")()),
     ("seq.cu_q is on meta", "device of q")),
    ("head ratio", set_(q=tensor(5, 3, D)), ("q has 3 heads and k has 2", "multiple")),
    ("padding batch", lambda call: call.update(mask=Padding(ints(1, 2, 3))), ("Padding.valid_lengths", "must be 2")),
    ("bias keys", lambda call: call.update(score=Bias(torch.zeros(3, 3))),
     ("Bias.bias has shape (3, 3)", "keys axis must be 1 or at least 4")),
    ("bias rows", lambda call: call.update(score=Bias(torch.zeros(2, 1))),
     ("Bias.bias has shape (2, 1)", "queries axis must be 1 or at least 3")),
    ("out shape", set_(out=tensor(7, HQ, DV)), ("out has shape (7, 4, 16)", "must have shape (5, 4, 16)")),
    ("out rank", set_(out=tensor(1, 5, HQ, DV)), ("out has shape (1, 5, 4, 16)", "rank 3 (seq, heads, head_dim)")),
    ("sm90", set_(backend="sm90"), ("q is on cpu", "CUDA capability 9.0")),
]  # fmt: skip

PAGED: list[tuple[str, Change, tuple[str, ...]]] = [
    ("kv a tuple", set_(kv=(1, 2)), ("kv is a tuple", "PagedKV")),
    ("q rank", set_(q=tensor(SQ, HQ, D)), ("q has shape (5, 4, 8)", "rank 4")),
    ("batch 0", set_(q=tensor(0, SQ, HQ, D)), ("kv.lengths has shape (2,)", "batch of q, 0")),
    ("pages rank", cache(k_pages=torch.zeros(4, 3, D)),
     ("kv.k_pages has shape (4, 3, 8)", "rank 4 (num_pages, page_size")),
    ("pages differ", cache(v_pages=torch.zeros(5, 3, HKV, DV)), ("kv.v_pages has 5 pages of 3", "4 pages of 3")),
    ("page size differs", cache(v_pages=torch.zeros(4, 2, HKV, DV)), ("kv.v_pages has 4 pages of 2", "4 pages of 3")),
    ("page size 0", cache(k_pages=torch.zeros(4, 0, HKV, D), v_pages=torch.zeros(4, 0, HKV, DV)),
     ("kv.k_pages has shape (4, 0, 2, 8)", "at least one key")),
    ("pages dtype", cache(k_pages=torch.zeros(4, 3, HKV, D, dtype=torch.float16)),
     ("kv.k_pages has dtype torch.float16", "dtype of q")),
    ("head dim", cache(k_pages=torch.zeros(4, 3, HKV, 16)), ("kv.k_pages has head_dim 16", "head_dim of q, 8")),
    ("head ratio", cache(k_pages=torch.zeros(4, 3, 3, D), v_pages=torch.zeros(4, 3, 3, DV)),
     ("q has 4 heads and kv.k_pages has 3", "multiple")),
    ("table int64", cache(block_table=torch.zeros(B, 3, dtype=torch.int64)), ("kv.block_table has dtype", "int32")),
    ("table rank", cache(block_table=ints(3, 1)), ("kv.block_table has shape (2,)", "rank 2 (batch, max_pages)")),
    ("table batch", cache(block_table=ints([0], [1], [2])), ("kv.block_table has shape (3, 1)", "batch of q, 2")),
    ("table negative", cache(block_table=ints([3, -1], [0, 0])), ("kv.block_table[0, 1] is -1", "within 0 .. 3")),
    ("table outside", cache(block_table=ints([3, 1], [4, 0])), ("kv.block_table[1, 0] is 4", "within 0 .. 3")),
    ("lengths dtype", cache(lengths=torch.tensor([5, 2])), ("kv.lengths has dtype torch.int64", "torch.int32")),
    ("lengths batch", cache(lengths=ints(5)), ("kv.lengths has shape (1,)", "batch of q, 2")),
    ("length negative", cache(lengths=ints(5, -1)), ("kv.lengths[1] is -1", "within 0 .. 9")),
    ("length too long", cache(lengths=ints(10, 2)), ("kv.lengths[0] is 10", "the keys of 3 pages")),
    ("lengths a list", cache(lengths=[5, 2]), ("kv.lengths is a list", "torch.Tensor")),
    ("lengths elsewhere", cache(lengths=ints(5, 2).to("meta")), ("kv.lengths is on meta", "device of q, cpu")),
    ("bias keys", lambda call: call.update(score=SoftCap(2.0) | Bias(torch.zeros(SQ, 4))),
     ("Bias.bias has shape (5, 4)", "keys axis must be 1 or at least 5")),
    ("sm90", set_(backend="sm90"), ("q is on cpu", "CUDA capability 9.0")),
]  # fmt: skip

MIXED: list[tuple[str, Change, tuple[str, ...]]] = [
    ("seq a tensor", set_(seq=tensor(3, dtype=torch.int32)), ("seq is a Tensor", "None or a warpattn Ragged(cu_q)")),
    ("q dense", set_(q=tensor(B, SQ, HQ, D)), ("q has shape (2, 5, 4, 8)", "rank 3 (total, heads, head_dim)")),
    ("offsets of keys", offsets((0, 1, 3), (0, 4, 7)), ("seq.cu_k is given", "must be None")),
    ("bound of keys", offsets((0, 1, 3), None, max_k=9), ("seq.max_k is given", "must be None")),
    ("bound negative", offsets((0, 1, 3), None, max_q=-1), ("seq.max_q is -1", "at least 0")),
    ("bound no int", offsets((0, 1, 3), None, max_q="2"), ("seq.max_q is '2'", "an int of at least 0")),
    ("bound too low", offsets((0, 1, 3), None, max_q=1), ("seq.max_q is 1", "sequence 1 has 2 rows")),
    ("offsets a list", offsets([0, 1, 3], None), ("seq.cu_q is a list", "torch.Tensor")),
    ("offsets int64", offsets(torch.tensor([0, 1, 3]), None), ("seq.cu_q has dtype torch.int64", "torch.int32")),
    ("no sequence", offsets((0,), None), ("kv.lengths has shape (2,)", "batch of seq.cu_q, 0")),
    ("end", offsets((0, 1, 2), None), ("seq.cu_q[-1] is 2", "end at the rows it divides, 3")),
    ("descending", offsets((0, 4, 3), None), ("seq.cu_q[1] is 4 and seq.cu_q[2] is 3", "never descend")),
    ("offsets elsewhere", offsets(ints(0, 1, 3).to("meta"), None), ("seq.cu_q is on meta", "device of q")),
    ("lengths batch", cache(lengths=ints(5)), ("kv.lengths has shape (1,)", "batch of seq.cu_q, 2")),
    ("table batch", cache(block_table=ints([0], [1], [2])), ("kv.block_table has shape (3, 1)", "seq.cu_q, 2")),
    ("table outside", cache(block_table=ints([3, 1], [4, 0])), ("kv.block_table[1, 0] is 4", "within 0 .. 3")),
    ("length too long", cache(lengths=ints(10, 2)), ("kv.lengths[0] is 10", "the keys of 3 pages")),
    ("pages rank", cache(k_pages=torch.zeros(4, 3, D)), ("kv.k_pages has shape (4, 3, 8)", "rank 4")),
    ("bias keys", lambda call: call.update(score=Bias(torch.zeros(2, 4))), ("keys axis must be 1 or at least 5",)),
    ("out shape", set_(out=tensor(4, HQ, DV)), ("out has shape (4, 4, 16)", "must have shape (3, 4, 16)")),
    ("sm90", set_(backend="sm90"), ("q is on cpu", "CUDA capability 9.0")),
]  # fmt: skip

CONSTRUCTED: list[tuple[str, Callable[[], object]]] = [
    ("window 0", lambda: SlidingWindow(0)),
    ("window text", lambda: SlidingWindow("8")),
    ("chunk 0", lambda: Chunked(0)),
    ("prefix negative", lambda: Prefix(-1)),
    ("lengths of floats", lambda: Padding(torch.zeros(2))),
    ("ids of floats", lambda: Document(torch.zeros(4))),
    ("matrix rank 2", lambda: Materialized(torch.ones(3, 3, dtype=torch.bool))),
    ("mask not callable", lambda: CustomMask(3)),
    ("cap 0", lambda: SoftCap(0.0)),
    ("cap nan", lambda: SoftCap(math.nan)),
    ("slopes of ints", lambda: ALiBi(ints(1, 2))),
    ("bias rank 1", lambda: Bias(torch.zeros(3))),
    ("score not callable", lambda: CustomScore("f")),
]  # fmt: skip

TABLE = [
    pytest.param(function, make, change, words, id=f"{make.__name__}: {name}")
    for function, make, table in (
        (attention, dense, DENSE),
        (attention_varlen, ragged, RAGGED),
        (attention_paged, paged, PAGED),
        (attention_paged, mixed, MIXED),
    )
    for name, change, words in table
]


@pytest.mark.parametrize(
    ("function", "make"),
    [(attention, dense), (attention_varlen, ragged), (attention_paged, paged), (attention_paged, mixed)],
)
def test_the_good_calls_are_good(function, make):
    out, lse = function(**make(), return_lse=True)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


@pytest.mark.parametrize(("function", "make", "change", "words"), TABLE)
def test_bad_input_is_refused(function, make, change, words):
    call = make()
    with pytest.raises(AttentionError) as caught:  # noqa: PT012 (masks may be refused while they are made)
        change(call)
        function(**call)
    text = str(caught.value)
    assert caught.value.reasons
    assert not [word for word in words if word not in text], text


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in CONSTRUCTED])
def test_bad_values_are_refused_when_made(make):
    with pytest.raises(AttentionError):
        make()


def test_the_table_is_long_enough():
    assert len(TABLE) >= 100


def test_all_reasons_come_at_once():
    q, k, v = torch.zeros(2, 5, 3, 8), torch.zeros(2, 7, 2, 16), torch.zeros(2, 6, 2, 8, dtype=torch.float16)
    with pytest.raises(AttentionError) as caught:
        attention(q, k, v, scale=math.nan, sinks=torch.zeros(2), mask="causal", backend="sm91", return_lse=None)
    text = str(caught.value)
    expected = ("v has 6 keys", "q has 3 heads and k has 2", "k has head_dim 16", "v has dtype torch.float16")
    expected += ("scale is nan", "sinks has shape (2,)", "mask is a str", "backend is 'sm91'", "return_lse is None")
    assert not [words for words in expected if words not in text]
    assert len(caught.value.reasons) == len(expected)
    assert text.startswith(f"{len(expected)} rules are broken:\n  - ")


def test_nothing_is_written_when_a_rule_is_broken():
    out = torch.full((B, SQ, HQ, DV), torch.nan)
    with pytest.raises(AttentionError):
        attention(**dense(), out=out, scale=math.inf)
    assert out.isnan().all()


def test_the_error_is_a_value_error_that_travels():
    error = AttentionError("a; b", "c; d")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ValueError) and again.reasons == error.reasons and str(again) == str(error)


def test_rules_without_a_broken_one_pass():
    rules = Rules()
    assert rules.require(True, "x is 1", "x must be 1")
    rules.done()
