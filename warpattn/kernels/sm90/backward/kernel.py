"""The roles of Hopper's backward kernel: dK and dV of 128 keys, and their part of dQ; then of the next keys.

load (1 warp)        K, V; Q, dO by TMA ──▶ rings                               (nvidia/backward/load.py)
attend 0, 1          S, P, dP, dS; dV and dK in registers; dS ──▶ ring          (attend.py, epilogue.py)
    or weigh         S, P; dV in registers; P ──▶ ring                          (by_product.py)
    and derive       dP, dS; dK in registers; dS ──▶ ring
reduce               dQ = dS · K, added in fp32 by TMA                          (reduce.py)
    or attend 0, 1   the same, where there is no `reduce`                       (add.py)
turn, add, pass      where dQ tiles have counters: CTAs add dQ after the first one, or in a
                     fixed order (1 warp each; no `add` where attending warpgroups add)
                                                                                (ordered.py)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...nvidia.backward.arguments import DeviceCode
from ...nvidia.backward.load import load_role
from .attend import attend_role
from .by_product import derive_role, weigh_role
from .captured import PRODUCTS
from .context import make_rings
from .ordered import add_role, pass_role, turn_role
from .reduce import reduce_role


@gluon.jit
def attend_0(ctx):
    attend_role(ctx, 0)


@gluon.jit
def attend_1(ctx):
    attend_role(ctx, 1)


@gluon.jit
def start_roles(ctx):
    """Runs every role in its warps; the topology lists them in the same order."""
    config: gl.constexpr = ctx.config
    workers: gl.constexpr = config.topology.workers
    gl.warp_specialize(
        ([(weigh_role, (ctx,))] if config.by_product else [(attend_0, (ctx,))])
        + ([(derive_role, (ctx,))] if config.by_product else [(attend_1, (ctx,))])
        + ([] if config.attend_adds else [(reduce_role, (ctx,))])
        + [(load_role, (ctx,))]
        + ([(turn_role, (ctx,))] if config.counted else [])
        + ([(add_role, (ctx,))] if config.counted and not config.attend_adds else [])
        + ([(pass_role, (ctx,))] if config.counted else []),
        workers.warps,
        workers.registers,
    )


DEVICE_CODE = DeviceCode(make_rings, start_roles, PRODUCTS)
