"""Pair-CTA: Blackwell prefill with two CTAs that share K and V, two query tiles of 128 rows in each; off by default.

      CTA 0   rows   0-127 of Q0, Q1 │ keys 0-63 of K  │ left half of V's columns  │ rows   0-127 of S, P, O
      CTA 1   rows 128-255 of Q0, Q1 │ keys 64-127     │ right half               │ rows 128-255

      load warp        each CTA its rows of Q and K and its columns of V             (prefill_2q/load.py)
      MMA warp         the leader's: products of 256 rows over both CTAs             (prefill_2q/mma.py)
      softmax 0, 1     each CTA its rows: S ──▶ P                                    (softmax.py)
                       at the end O ──▶ memory                                       (prefill_2q/epilogue.py)
      correction       each CTA its rows: O *= scale                                 (prefill_2q/correction.py)

A product of the pair reads both halves of its operands and each CTA keeps its rows of the result, so K and V are loaded
and held once for 512 rows: rings are twice as deep and shared memory is read half as often. CTA 0, the leader, issues
the products: barriers for what they read are its own (`two_ctas`), and commits arrive in both CTAs. Dense batches; no
plan chooses it (config.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..prefill_2q.correction import correct_tiles
from ..prefill_2q.load import load_tiles
from ..prefill_2q.mma import multiply_tiles
from .softmax import softmax_role


@gluon.jit
def start_pair(ctx, workers: gl.constexpr):
    """Run every role in its warps; a tile of a dense batch has at least one row and one key tile."""
    gl.warp_specialize([(correct_tiles, (ctx,)), (softmax_role, (ctx, 0)), (softmax_role, (ctx, 1)),
                        (multiply_tiles, (ctx,)), (load_tiles, (ctx,))], workers.warps, workers.registers)  # fmt: skip
