"""SM100MHA2Q: Blackwell prefill with two query tiles of 128 rows a CTA, as roles of a warp-specialised kernel.

      load warp        Q, K, V by TMA ──▶ shared memory                              (load.py)
      convert          K, V of 8 bits ──▶ of 16, where they have 8                   (convert.py)
      MMA warp         S = Q·K, O += P·V in tensor memory                            (mma.py)
      softmax 0, 1     S ──▶ P, each for one query tile; at the end O ──▶ memory     (softmax.py, epilogue.py)
      correction       O *= scale where the softmax's reference moved                (correction.py)

The kernels of one query tile and of pairs share context.py and most functions of these roles; sm100/kernel.py is the
entry of all three.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .convert import convert_role
from .correction import correction_role
from .load import load_role
from .mma import mma_role
from .softmax import softmax_role


@gluon.jit
def start_2q(ctx, workers: gl.constexpr):
    """Run every role in its warps; the topology lists them in this order."""
    gl.warp_specialize([(correction_role, (ctx,)), (softmax_role, (ctx, 0)), (softmax_role, (ctx, 1)),
                        (mma_role, (ctx,)), (load_role, (ctx,))]
                       + ([(convert_role, (ctx,))] if ctx.config.converts else []),
                       workers.warps, workers.registers)  # fmt: skip
