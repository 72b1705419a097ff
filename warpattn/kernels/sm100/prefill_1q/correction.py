"""Correction warpgroup of the 1Q kernel: O0 and O1 in turn, each with every other key tile."""

from triton.experimental import gluon

from ..prefill_2q.correction import allow_first, correct


@gluon.jit
def correction_role(ctx):
    """Both accumulators in turn; there is nothing to rescale before their second tiles."""
    if ctx.run.total > 0:
        allow_first(ctx)
        for n in range(2, ctx.run.total, 2):
            correct(ctx, 0, n // 2)
            if n + 1 < ctx.run.total:
                correct(ctx, 1, n // 2)
