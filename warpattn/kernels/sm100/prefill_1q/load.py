"""Load warp of the 1Q kernel: Q and K0, K1, V0, K2, V1, K3, …"""

from triton.experimental import gluon

from ..prefill_2q.context import producer
from ..prefill_2q.load import load_k, load_v


@gluon.jit
def load_role(ctx):
    """Feed the run's keys in its order, K two tiles ahead of V."""
    total = ctx.run.total
    if total > 0:
        ring = producer(ctx)
        state = load_k(ctx, ring, ring.start(), ctx.run.key_tile(0), True)
        if total > 1:
            state = load_k(ctx, ring, state, ctx.run.key_tile(1), False)
        for n in range(total):
            state = load_v(ctx, ring, state, ctx.run.key_tile(n))
            if n + 2 < total:
                state = load_k(ctx, ring, state, ctx.run.key_tile(n + 2), False)
