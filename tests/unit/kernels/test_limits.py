"""A plan refuses what a call with that backend is refused for, in the same words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from warpattn.errors import AttentionError
from warpattn.kernels.sm90.paged_ragged import PagedRaggedConfig
from warpattn.kernels.sm90.prefill.config import ALIGNMENT
from warpattn.problem import Call, Problem, validate
from warpattn.problem.arch import ARCHS as CHIPS
from warpattn.problem.problem import Scales
from warpattn.problem.rules import MAX_SIZE
from warpattn.runtime.plan import plan
from warpattn.sequences import Dense

ARCHS = ("sm90", "sm100", "sm103", "gfx942", "gfx950")


def call(dim_qk: int, dim_v: int, seq_q: int = 3, dtype: torch.dtype = torch.bfloat16) -> Call:
    q, k, v = (torch.empty(2, seq, 4, dim, dtype=dtype) for seq, dim in ((seq_q, dim_qk), (5, dim_qk), (5, dim_v)))
    return Call(q, k, v, Dense(), backend="reference")


def problem(**changes: object) -> Problem:
    return replace(validate(call(64, 64)).problem, **changes)


def reasons(refused, *arguments, **options) -> tuple[str, ...]:
    """Why a function refuses; empty where it does not."""
    try:
        refused(*arguments, **options)
    except AttentionError as error:
        return error.reasons
    return ()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "asked",
    [
        {"dim_qk": 520, "dim_v": 512},
        {"dim_qk": 512, "dim_v": 512},
        {"dim_qk": 256, "dim_v": 256},
        {"dim_qk": 128, "dim_v": 136},
        {"dim_qk": 20, "dim_v": 64},
        {"dim_qk": 64, "dim_v": 64, "dtype": torch.float32},
        {"dim_qk": 264, "dim_v": 4, "dtype": torch.float64},
        {"dim_qk": 576, "dim_v": 512, "seq_q": 17},
        {"dim_qk": 576, "dim_v": 512},
        {"dim_qk": 128, "dim_v": 64},
    ],
)
def test_plans_and_calls_have_the_same_limits(arch, asked):
    made = call(**asked)
    of_call = reasons(validate, replace_backend(made, f"simulate:{arch}"), read_values=False)
    of_plan = reasons(plan, validate(made).problem, arch)
    assert of_plan == of_call


def replace_backend(made: Call, backend: str) -> Call:
    return Call(made.q, made.k, made.v, made.sequence, backend=backend)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batch": 0}, "batch is 0; batch must be at least 1"),
        ({"seq_q": -1}, "seq_q is -1; seq_q must be at least 0"),
        ({"heads_q": 0}, "heads_q is 0; heads_q must be at least 1"),
        ({"heads_kv": 0}, "heads_kv is 0; heads_kv must be at least 1"),
        ({"heads_q": 6}, "heads_q is 6 and heads_kv is 4; the query heads must be a multiple of the key heads"),
        ({"seq_k": MAX_SIZE + 1}, f"seq_k is {MAX_SIZE + 1}; the ARCH backend takes at most {MAX_SIZE}"),
        ({"kind": "ragged", "dim_qk": 576, "dim_v": 512}, "the keys and values are ragged; with head dims 576 and 512"),
        ({"dim_v": 0}, "dim_v is 0; dim_v must be at least 1"),
    ],
)
def test_sizes_that_no_tensors_could_have(arch, changes, reason):
    found = reasons(plan, problem(**changes), arch)
    assert any(one.startswith(reason.replace("ARCH", arch)) for one in found), found


def test_an_empty_sequence_has_a_plan():
    assert plan(problem(seq_k=0)).kernel


STORED = [
    Scales("head", "head", None), Scales("token", "token", None), Scales(64, 64, None), Scales(128, 128, None),
    Scales("token", 64, None), Scales("head", "head", "head"), Scales("token", "token", "token"),
    Scales("64 rows", "head", "64 rows"),
]  # fmt: skip
KINDS = ("dense", "ragged", "paged", "paged-ragged")


def prefills_of_8_bits(scales: Scales, dim: int) -> Iterator[Problem]:
    """Few and many queries of one head dim, of all kinds of sequences."""
    bits = torch.float8_e4m3fn
    for kind, seq_q, dim_v in product(KINDS, (100, 5000), {dim, min(dim, 128)}):
        yield problem(
            kind=kind, page_size=16 if "paged" in kind else 0, max_q=seq_q if kind == "paged-ragged" else 0,
            seq_q=seq_q, seq_k=seq_q + 32, dim_qk=dim, dim_v=dim_v, kv_dtype=bits,
            q_dtype=bits if scales.q else None, scales=scales,
        )  # fmt: skip


@pytest.mark.parametrize("scales", STORED, ids=str)
def test_tiles_of_8_bits_and_their_scales_fit_a_block(scales: Scales) -> None:
    for dim in range(16, 257, 16):
        for asked in prefills_of_8_bits(scales, dim):
            config = plan(asked, "sm90").choice.config
            choices = (config.few, config.many) if isinstance(config, PagedRaggedConfig) else ()
            for each in [choice.config for choice in choices if choice] or [config]:
                assert each.topology.smem_bytes + ALIGNMENT <= CHIPS["sm90"].smem, (asked.kind, dim, asked.dim_v)
