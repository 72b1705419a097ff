"""The launches of a call on Blackwell, with every argument by name."""

from __future__ import annotations

from warpattn.operands import Operands, captured, flat, programs
from warpattn.problem import Ready
from warpattn.sequences import Sequence
from warpattn.step import Step
from warpattn.target import ARCHS

from .choose import choose

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def steps(ready: Ready, x: Operands, sequence: Sequence) -> tuple[Step, ...]:
    """One launch of the prefill kernel."""
    problem = ready.problem
    choice = choose(problem, ARCHS["sm100"])
    mask, score = programs(ready)
    tensors = tuple(tensor.detach() for tensor in captured(ready))
    count = len(ready.mask.tensors)
    args = {
        "q_desc": x.q, "k_desc": x.k, "v_desc": x.v, "o_desc": x.out, "lse_ptr": x.lse, "sinks_ptr": x.sinks,
        "scale": ready.scale, "shape": (problem.seq_q, problem.seq_k, problem.heads_q, choice.grid[0]),
        "mask_args": flat(tensors[:count]), "score_args": flat(tensors[count:]),
    }  # fmt: skip
    constants = {
        "group": problem.heads_q // problem.heads_kv, "has_sinks": problem.has_sinks, "has_lse": problem.has_lse
    }  # fmt: skip

    def source():
        from .build import prefill_source  # imports Triton

        return prefill_source(choice.config, mask, score, **constants)

    key = (choice.config, mask.key, None if score is None else score.key, *constants.values())
    return (Step("sm100.prefill", "sm100", key, source, OPTIONS, choice.grid, args),)
