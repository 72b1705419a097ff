"""The launches of a call on Hopper, with every argument by name."""

from __future__ import annotations

from dataclasses import replace

import torch

from warpattn.nodes import Program
from warpattn.operands import Operands, captured, flat, programs
from warpattn.problem import Problem, Ready
from warpattn.sequences import PagedKV, Ragged, Sequence
from warpattn.step import Choice, Step, Terms
from warpattn.target import ARCHS, Arch

from . import decode_steps, prefill_lengths_steps
from .choose import choose as dense_choice
from .launcher import Shape
from .prefill_lengths_choose import choose as lengths_choice


def steps_on(ready: Ready, x: Operands, sequence: Sequence, terms: Terms) -> tuple[Step, ...]:
    """One launch of decode or of prefill; two for prefill of ragged batches and paged caches, see its steps. Prefill
    never splits keys, so it is batch-invariant."""
    if decode_steps.serves(ready.problem):
        choice = decode_steps.choose(ready.problem, ARCHS["sm90"], terms=terms)
        return decode_steps.steps(ready, x, sequence, choice)
    if isinstance(sequence, Ragged | PagedKV):
        return prefill_lengths_steps.steps(ready, x, sequence)
    return (prefill(ready, x, dense_choice(ready.problem, ARCHS["sm90"])),)


def choose(problem: Problem, target: Arch) -> Choice:
    """Which kernel a problem gets."""
    if decode_steps.serves(problem):
        return decode_steps.choose(problem, target)
    return (dense_choice if problem.kind == "dense" else lengths_choice)(problem, target)


def prefill(ready: Ready, x: Operands, choice: Choice) -> Step:
    """The launch of the prefill kernel of a choice."""
    problem = ready.problem
    tensors = tuple(tensor.detach() for tensor in captured(ready))
    count = len(ready.mask.tensors)
    args = {
        "q_desc": x.q, "k_desc": x.k, "v_desc": x.v, "o_desc": x.out, "lse_ptr": x.lse, "sinks_ptr": x.sinks,
        "counter_ptr": torch.zeros(1, dtype=torch.int32, device=x.q.device), "scale": ready.scale,
        "shape": shape_of(problem, choice).values(), "mask_args": flat(tensors[:count]),
        "score_args": flat(tensors[count:]),
    }  # fmt: skip
    return replace(prefill_code(problem, choice, *programs(ready)), args=args)


def prefill_code(problem: Problem, choice: Choice, mask: Program, score: Program | None) -> Step:
    """The launch without its arguments: what is needed to compile the kernel."""

    def source():
        from .build import prefill_source  # imports Triton

        return prefill_source(choice.config, mask, score, problem.has_sinks, problem.has_lse)

    key = (choice.config, mask.key, None if score is None else score.key, problem.has_sinks, problem.has_lse)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return Step("sm90.prefill", "sm90", key, source, options, choice.grid, {}, persistent=True)


def shape_of(problem: Problem, choice: Choice) -> Shape:
    """The kernel's integers."""
    order = choice.order
    group = problem.heads_q // problem.heads_kv
    return Shape(problem.seq_q, problem.seq_k, problem.heads_q, group, order.m_tiles, order.heads, order.section)
