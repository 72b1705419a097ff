"""Fills the disk cache with the kernels of a list of cases, on all cores that this process may use: one compile takes
seconds and one core."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from tests.cases import Case
from warpattn.problem import Call, validate
from warpattn.problem.operands import Operands
from warpattn.runtime import compiler, kernel_cache
from warpattn.runtime.launches import list_launches

SIMPLE = {"none", "full", "causal"}


def kernels_of(cases: Iterable[Case]) -> list[tuple[Case, bool]]:
    """One case, and whether it returns an LSE, for each kernel that the cases may need; lengths and heads are constants
    of some masks' code."""
    found = {}
    for case in cases:
        has_lse = case.has_lse
        case = replace(case, layout="contiguous", scale=None if case.scale is None else min(case.scale, 1.0))
        if case.mask in SIMPLE and case.score == "none":
            case = replace(case, heads_q=2, heads_kv=1)
            case = replace(case, batch=1, seq_q=64, seq_k=64) if case.kind == "dense" else case
        found[case, has_lse] = None
    return list(found)


def compile_case(case: Case, has_lse: bool) -> None:
    """Compile the kernel of one case unless it is in the cache."""
    inputs = case.build()
    call = Call(
        inputs.q, inputs.k, inputs.v, inputs.sequence, inputs.mask, inputs.score, inputs.sinks, inputs.scale, has_lse
    )
    ready = validate(replace(call, backend="reference"))
    out = inputs.q.new_empty((*inputs.q.shape[:-1], inputs.v.shape[-1]))
    lse = torch.empty(ready.lse_shape) if has_lse else None
    operands = Operands(inputs.q, inputs.k, inputs.v, out, lse, inputs.sinks)
    for step in list_launches(replace(ready, backend="sm90"), operands, inputs.sequence):
        kernel_cache.find((step.name, step.arch, step.key), partial(compiler.artifact_of, step))


def fill(cases: Iterable[Case]) -> None:
    """Compile what the cases need, in fresh processes: this one may have CUDA running.

    What does not compile is left to the test that needs it, which then says why.
    """
    needed = kernels_of(cases)
    if not needed:
        return
    workers = min(len(needed), len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        for future in [pool.submit(compile_case, *each) for each in needed]:
            future.exception()


def _one_thread() -> None:
    torch.set_num_threads(1)
