"""Plans are pure, say why, and never ask for what the machine does not have."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import cast

import pytest
import torch

import warpattn as wa
from tests.drawn import drawn, each_once
from warpattn.errors import AttentionError
from warpattn.kernels.sm90.decode.config import DecodeConfig
from warpattn.kernels.sm90.prefill.config import SMEM_LIMIT
from warpattn.problem import Call, Problem, validate
from warpattn.problem.arch import ARCHS
from warpattn.problem.element import BF16
from warpattn.problem.launch import EARLY, EARLY_AND_WAITS, PlanOptions
from warpattn.problem.operands import COPY_RULE, Operands
from warpattn.runtime.launches import list_launches
from warpattn.runtime.plan import plan
from warpattn.runtime.training.plan import plan_backward
from warpattn.sequences import Dense

DIMS = range(8, 257, 8)


def problem(mask: wa.Mask | None = None, **changes: object) -> Problem:
    q = torch.empty(2, 6, 4, 64, dtype=torch.bfloat16)
    k = torch.empty(2, 9, 2, 64, dtype=torch.bfloat16)
    ready = validate(Call(q, k, k, Dense(), mask, backend="reference"))
    return replace(ready.problem, device_type="cuda", **changes)


def test_equal_problems_have_equal_plans():
    assert plan(problem(wa.Causal())) == plan(problem(wa.Causal()))
    assert hash(plan(problem(wa.Causal()))) == hash(plan(problem(wa.Causal())))


def test_a_plan_prints_itself_and_its_reasons():
    chosen = plan(problem(batch=3, seq_q=1000, seq_k=2000, heads_q=8, heads_kv=2, dim_qk=128, dim_v=64))
    text = str(chosen)
    assert "seq 1000 x 2000, heads 8/2, head dim 128/64, bfloat16" in text
    assert len(chosen.choice.reasons) >= 3 and COPY_RULE in chosen.choice.reasons
    assert all(f"because {reason}" in text for reason in chosen.choice.reasons)


@pytest.mark.parametrize(
    ("columns", "kind", "exact"),
    [(80, "dense", True), (208, "ragged", True), (64, "dense", False), (104, "dense", False), (72, "dense", False)],
)
def test_a_plan_says_when_products_have_exactly_the_columns_of_values(columns, kind, exact):
    """And not in parts, whose padding takes time, too. Those of 72 columns do without a mask alone."""
    masked = problem(wa.Causal(), batch=8, seq_q=2000, seq_k=2000, dim_qk=columns, dim_v=columns, kind=kind)
    assert (f"P·V is one product of exactly {columns} columns" in str(plan(masked, "sm90"))) == exact


@pytest.mark.parametrize(("columns", "exact"), [(64, False), (80, True), (96, False), (112, True), (128, False)])
def test_a_backward_plan_says_the_same_of_gradients(columns, exact):
    """At 96 columns parts of 64 and 32 have no padding."""
    long = problem(wa.Causal(), seq_q=2000, seq_k=2000, dim_qk=columns, dim_v=columns)
    assert ("products of exactly their columns" in str(plan_backward(long, "sm90"))) == exact


ONE_OF_MANY = re.compile(r"(?<![\w.,/:×-])1 (?!x |×|of |to |by |and )(?:\w+ ){0,2}(?!is\b|takes\b)\w+s\b")
SMALLEST = {"batch": 1, "heads_q": 1, "heads_kv": 1, "seq_q": 1, "seq_k": 1}


@pytest.mark.parametrize("arch", ["sm90", "sm100", "gfx942", "gfx950"])
def test_one_is_singular(arch):
    wide, long = {"dim_qk": 128, "dim_v": 128}, {"seq_q": 200, "seq_k": 40_000}
    made = [SMALLEST | more for more in ({}, wide, long, wide | long, {"seq_k": 4096}, {"seq_k": 4096, "heads_q": 8})]
    made += [one | {"kind": "paged", "page_size": 64} for one in made]
    made += [made[2] | {"kind": "paged-ragged", "page_size": 64, "max_q": 200}, made[2] | {"kind": "ragged"}]
    made += [SMALLEST | {"dim_qk": 576, "dim_v": 512, "seq_k": keys} for keys in (64, 4096)]
    plans = [plan(problem(mask, **one), arch) for one in made for mask in (None, wa.Causal())]
    plans += [plan_backward(problem(**one), arch) for one in made[:4] if one["seq_q"] <= one["seq_k"]]
    found = [line for each in plans for line in str(each).splitlines() if ONE_OF_MANY.search(line)]
    assert not found, "\n".join(found)


def test_a_plan_says_what_starts_early():
    decoding = {"seq_q": 1, "seq_k": 4096}
    split = {"batch": 1, "seq_q": 64, "seq_k": 100_000}
    paged = {"kind": "paged", "page_size": 64, "seq_q": 64, "seq_k": 4096}
    for changes in ({"seq_q": 4096, "seq_k": 4096}, split, paged, decoding):
        choice = plan(problem(wa.Causal(), **changes)).choice
        (reason,) = [reason for reason in choice.reasons if reason.startswith(EARLY)]
        triggers = choice.kernel == "prefill" and choice.partitions == 1
        assert reason.endswith("next kernel may") == triggers, reason
    for arch in ("sm90", "sm100"):
        reasons = plan_backward(problem(wa.Causal(), seq_q=1000, seq_k=1000), arch).choice.reasons
        assert EARLY_AND_WAITS in reasons and str(reasons).count(EARLY) == 1


ENDS = [None, wa.Causal()], [1, 700, 2048, 2049, 100_000]


@pytest.mark.parametrize(
    ("mask", "seq"), drawn(product(*ENDS), each_once(*ENDS)[1:3])
)
def test_every_head_dim_fits_the_machine(mask, seq):
    base = problem(mask, seq_q=seq, seq_k=seq)
    for dim_qk in DIMS:
        for dim_v in DIMS:
            config = plan(replace(base, dim_qk=dim_qk, dim_v=dim_v)).choice.config
            assert config.smem_bytes <= SMEM_LIMIT - 1024, (dim_qk, dim_v)
            threads = 128 * config.consumers
            registers = threads * config.registers.consumer + 128 * config.registers.producer
            assert registers <= 65536, (dim_qk, dim_v)
            assert config.dim_qk == dim_qk and config.dim_v == dim_v


@pytest.mark.parametrize("seq", [1, 64, 127, 128, 129, 5000])
@pytest.mark.parametrize("batch", [1, 7])
def test_tiles_cover_every_row_once(seq, batch):
    chosen = plan(problem(batch=batch, seq_q=seq))
    config, order = chosen.choice.config, chosen.choice.order
    rows = config.tokens
    assert (order.m_tiles - 1) * rows < seq <= order.m_tiles * rows
    most = ARCHS["sm90"].processors * config.ctas
    assert 1 <= chosen.choice.grid[0] <= min(most, order.heads * order.m_tiles)
    assert 1 <= order.section <= order.heads


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(16, 16), (64, 8), (8, 1)])
@pytest.mark.parametrize("seq", [0, 1000, 16_384, 10_000_000])
def test_sections_keep_the_heads_of_a_group_together(heads_q, heads_kv, seq):
    chosen = plan(problem(batch=3, heads_q=heads_q, heads_kv=heads_kv, seq_q=128, seq_k=seq))
    assert chosen.choice.order.section % (heads_q // heads_kv) == 0


def test_masks_that_hide_nothing_are_no_masks():
    long = {"dim_qk": 64, "dim_v": 64}
    assert plan(problem(wa.Full(), **long)).choice == plan(problem(None, **long)).choice
    assert plan(problem(~~wa.Full(), **long)).choice == plan(problem(None, **long)).choice


def test_fp16_differs_in_its_dtype_only():
    one, other = plan(problem()).choice.config, plan(problem(dtype=torch.float16)).choice.config
    assert replace(other, operands=replace(other.operands, element=BF16)) == one


def test_planning_needs_neither_triton_nor_a_driver():
    program = (
        "import sys, warpattn.runtime.execute, warpattn.runtime.plan; "
        "print('triton' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("arch", ["sm90", "sm100", "gfx942", "gfx950"])
def test_batch_invariant_steps_share_no_keys_out(arch):
    """What `DecodePlan(..., batch_invariant=True)` launches. Otherwise keys of a few sequences are shared out over CTAs
    that are free; on Hopper parts stay, but of a fixed number of keys."""
    q, k = torch.empty(2, 1, 4, 64, dtype=torch.bfloat16), torch.empty(2, 4000, 1, 64, dtype=torch.bfloat16)
    x = Operands(q, k, k.clone(), torch.empty_like(q), None, None)
    ready = validate(Call(q, k, x.v, Dense(), backend=f"simulate:{arch}"))
    free, fixed = list_launches(ready, x, Dense()), list_launches(ready, x, Dense(), PlanOptions(batch_invariant=True))
    if arch == "sm90":
        parts = [cast("tuple[DecodeConfig]", step.key)[0] for step in (free[0], fixed[0])]
        assert [part.schedule.invariant for part in parts] == [False, True]
        assert parts[1].schedule.unit * parts[1].block_n == 2048
    else:
        assert len(free) == 2 and "combine" in free[1].name
        assert len(fixed) == 1, "one launch: nothing is combined"


def test_a_b300_has_the_plans_of_a_b200():
    b200, b300 = (str(plan(problem(), arch)).splitlines() for arch in ("sm100", "sm103"))
    assert b300[0] == b200[0].replace("on sm100", "on sm103") and b300[0].startswith("sm100.")
    assert b300[1:-1] == b200[1:] and "machine code of its own" in b300[-1]


@pytest.mark.parametrize("name", ["sm80", "sm86", "sm89", "sm120", "sm121"])
def test_chips_without_kernels_are_known(name):
    with pytest.raises(AttentionError, match=f'arch is {name}, which has no kernels, only backend="reference"'):
        plan(problem(), name)
