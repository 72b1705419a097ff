"""The roles of Blackwell's backward: dK and dV of a CTA's keys, and their part of dQ.

load (1 warp)     K, V; Q, dO by TMA ──▶ rings                          (nvidia/backward/load.py)
mma (1 warp)      S, dP; dV, dK, dQ in tensor memory                    (mma.py)
weigh, derive     S ──▶ P;  P, dP ──▶ dS;  at the end dV and dK         (weigh.py, epilogue.py)
reduce            dQ, added in fp32 by TMA                              (reduce.py)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.backward.arguments import DeviceCode
from ...nvidia.backward.load import load_role
from .captured import PRODUCTS
from .context import make_rings
from .mma import mma_role
from .reduce import reduce_role
from .weigh import derive_role, weigh_role


@gluon.jit
def start_roles(ctx):
    """Run every role in its warps; the topology lists them in this order."""
    workers: gl.constexpr = ctx.config.topology.workers
    gl.warp_specialize(
        [(weigh_role, (ctx,)), (derive_role, (ctx,)), (reduce_role, (ctx,)), (mma_role, (ctx,)), (load_role, (ctx,))],
        workers.warps,
        workers.registers,
    )


DEVICE_CODE = DeviceCode(make_rings, start_roles, PRODUCTS)
