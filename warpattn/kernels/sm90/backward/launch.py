"""The launches of a backward call on Hopper, with every argument by name: prepare, the main kernel, finish."""

from __future__ import annotations

import torch

from warpattn.problem import Problem
from warpattn.problem.arch import ARCHS, compile_options
from warpattn.problem.backward import CheckedBackward, Gradients
from warpattn.problem.launch import Choice, Launch
from warpattn.problem.operands import modifier_args, programs

from ..arguments import strided
from .config import PADDING, ROWS, Added, BackwardShape, Prepared, RowShape, Statistics, choose

OPTIONS = compile_options()


def list_backward_launches(
    checked: CheckedBackward, x: Gradients, choice: Choice | None = None
) -> tuple[Launch, ...]:
    """The three launches of a dense backward call, with the planner's choice or a given one.

    `x` is `fitted_gradients`, and has queries and keys (`without_tiles` is for the rest).
    """
    problem = checked.forward.problem
    choice = choose(problem, ARCHS["sm90"]) if choice is None else choice
    padded_q = PADDING * -(-problem.seq_q // PADDING)
    heads = problem.batch * problem.heads_q
    made = Prepared(
        shift=_empty(x, heads, padded_q),
        delta=_empty(x, heads, padded_q),
        dq=_empty(x, heads, problem.seq_q, problem.dim_qk),
        dsinks=None if x.dsinks is None else _empty(x, heads, padded_q // ROWS),
    )
    shape = RowShape(problem.batch, problem.seq_q, padded_q, problem.heads_q)
    return (
        prepare_launch(checked, x, choice, made, shape),
        main_launch(checked, x, choice, made),
        finish_launch(checked, x, choice, made, shape),
    )


def prepare_launch(
    checked: CheckedBackward, x: Gradients, choice: Choice, made: Prepared, shape: RowShape
) -> Launch:
    """Write `made`."""
    has_dlse, has_sinks = x.dlse is not None, x.dsinks is not None
    score = programs(checked.forward)[1]
    args = {
        "out": strided(x.out), "dout": strided(x.dout), "statistics": Statistics(x.lse, x.dlse, x.sinks),
        "made": made, "unit": 1 / checked.forward.scale if score is None else 1.0, "shape": shape,
    }  # fmt: skip

    def source():
        from .signature import prepare_source  # imports Triton

        return prepare_source(choice.config, has_dlse, has_sinks)

    key = (choice.config, has_dlse, has_sinks)
    return Launch("sm90.backward_prepare", "sm90", key, source, OPTIONS, _row_grid(shape), args)


def main_launch(checked: CheckedBackward, x: Gradients, choice: Choice, made: Prepared) -> Launch:
    """Write dk and dv, and add to `made.dq`."""
    mask, score = programs(checked.forward)
    slope = checked.slope
    args = {
        "reads": (x.q, x.k, x.v, x.dout), "writes": (x.dk, x.dv, made.dq), "numbers": (made.shift, made.delta),
        "scale": checked.forward.scale, "shape": _shape(checked.forward.problem, choice),
        **modifier_args(checked.forward),
    }  # fmt: skip

    def source():
        from .signature import backward_source  # imports Triton

        return backward_source(choice.config, mask, score, slope)

    key = (choice.config, mask.key, None if score is None else score.key, checked.key)
    return Launch("sm90.backward", "sm90", key, source, OPTIONS, choice.grid, args, l2_promotion=256)


def finish_launch(
    checked: CheckedBackward, x: Gradients, choice: Choice, made: Prepared, shape: RowShape
) -> Launch:
    """Write dq and dsinks from `made`."""
    has_sinks = x.dsinks is not None
    args = {
        "dq": strided(x.dq), "sums": Added(made.dq, made.dsinks), "dsinks": x.dsinks,
        "scale": checked.forward.scale, "shape": shape,
    }  # fmt: skip

    def source():
        from .signature import finish_source  # imports Triton

        return finish_source(choice.config, has_sinks)

    key = (choice.config, has_sinks)
    return Launch("sm90.backward_finish", "sm90", key, source, OPTIONS, _row_grid(shape), args)


def _shape(problem: Problem, choice: Choice) -> BackwardShape:
    order, group = choice.order, problem.heads_q // problem.heads_kv
    return BackwardShape(
        problem.seq_q, problem.seq_k, problem.heads_q, group, order.n_tiles, order.heads, order.section
    )


def _row_grid(shape: RowShape) -> tuple[int, int]:
    return (shape.padded_q // ROWS, shape.batch * shape.heads_q)


def _empty(x: Gradients, *sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.float32, device=x.q.device)
