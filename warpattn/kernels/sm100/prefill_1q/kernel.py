"""SM100 1Q: Blackwell attention with one query tile of 128 rows a CTA, for short prompts and split keys.

The two softmax warpgroups work on the same rows. Key tiles alternate between them, even ones through S0 and O0, odd
ones through S1 and O1, so the tensor core is as busy as with two query tiles; at the end the accumulators are combined.

      load warp        Q, K, V by TMA ──▶ shared memory                              (load.py)
      MMA warp         S0, S1 = Q·K in turn, O0, O1 += P·V                           (mma.py)
      softmax 0, 1     S ──▶ P of every other key tile; then the combination          (softmax.py, epilogue.py)
      correction       O *= scale where the softmax's reference moved                (correction.py)

With `splitk_partitions` as many CTAs each take a part of a query tile's key tiles (pieces/span.py), and another
kernel combines their results (nvidia/combine_parts.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .correction import correction_role
from .load import load_role
from .mma import mma_role
from .softmax import softmax_role


@gluon.jit
def start_1q(ctx, workers: gl.constexpr):
    """Run every role in its warps."""
    gl.warp_specialize([(correction_role, (ctx,)), (softmax_role, (ctx, 0)), (softmax_role, (ctx, 1)),
                        (mma_role, (ctx,)), (load_role, (ctx,))], workers.warps, workers.registers)  # fmt: skip
