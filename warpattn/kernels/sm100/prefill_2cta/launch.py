"""The launch of the pair kernel, for a choice whose config asks for pairs; no plan does (see kernel.py)."""

from __future__ import annotations

from typing import Any

from warpattn.problem import CheckedCall
from warpattn.problem.arch import compile_options
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import Operands, modifier_args, programs

from ..traits import Traits

OPTIONS = compile_options(num_ctas=2)


def pair_launch(checked: CheckedCall, x: Operands, choice: Choice) -> Launch:
    """The launch; its grid counts clusters."""
    p, config = checked.problem, choice.config
    mask, score = programs(checked)
    args = {
        "q_desc": x.q, "k_desc": x.k, "v_desc": x.v, "o_desc": x.out, "lse_ptr": x.lse, "sinks_ptr": x.sinks,
        "scale": checked.scale, "shape": (p.seq_q, p.seq_k, p.heads_q, choice.grid[0]), **modifier_args(checked),
    }  # fmt: skip
    traits = Traits(p.kind, p.heads_q // p.heads_kv, p.has_sinks, p.has_lse)

    def source() -> Any:
        from .signature import pair_source  # imports Triton

        return pair_source(config, traits, mask, score)

    key = (config, traits, mask.key, None if score is None else score.key)
    return Launch("sm100.prefill_pair", "sm100", key, source, OPTIONS, choice.grid, args)
