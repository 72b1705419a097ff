"""Hopper backward: gradients of 128 keys of a head, and what they add to the queries that see them; then the next keys.

load (1 warp)        K, V; Q, dO by TMA ──▶ rings                               (nvidia/backward/load.py)
attend 0, 1          S, P, dP, dS; dV and dK in registers; dS ──▶ ring          (attend.py, epilogue.py)
    or weigh         S, P; dV in registers; P ──▶ ring                          (by_product.py)
    and derive       dP, dS; dK in registers; dS ──▶ ring
reduce               dQ = dS · K, added in fp32 by TMA                          (reduce.py)
    or attend 0, 1   the same, where there is no `reduce`                       (add.py)
turn, add, pass      for deterministic gradients: add dQ of `reduce` in a fixed order, or have the
                     attending warpgroups add in it (1 warp each)               (ordered.py)
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
    """Run every role in its warps; the topology lists them in this order."""
    workers: gl.constexpr = ctx.config.topology.workers
    if ctx.config.by_product and ctx.config.deterministic:
        gl.warp_specialize(
            [
                (weigh_role, (ctx,)), (derive_role, (ctx,)), (reduce_role, (ctx,)), (load_role, (ctx,)),
                (turn_role, (ctx,)), (add_role, (ctx,)), (pass_role, (ctx,)),
            ],
            workers.warps,
            workers.registers,
        )  # fmt: skip
    elif ctx.config.by_product:
        gl.warp_specialize(
            [(weigh_role, (ctx,)), (derive_role, (ctx,)), (reduce_role, (ctx,)), (load_role, (ctx,))],
            workers.warps,
            workers.registers,
        )
    elif ctx.config.attend_adds and ctx.config.deterministic:
        gl.warp_specialize(
            [(attend_0, (ctx,)), (attend_1, (ctx,)), (load_role, (ctx,)), (turn_role, (ctx,)), (pass_role, (ctx,))],
            workers.warps,
            workers.registers,
        )
    elif ctx.config.attend_adds:
        gl.warp_specialize(
            [(attend_0, (ctx,)), (attend_1, (ctx,)), (load_role, (ctx,))], workers.warps, workers.registers
        )
    elif ctx.config.deterministic:
        gl.warp_specialize(
            [
                (attend_0, (ctx,)), (attend_1, (ctx,)), (reduce_role, (ctx,)), (load_role, (ctx,)),
                (turn_role, (ctx,)), (add_role, (ctx,)), (pass_role, (ctx,)),
            ],
            workers.warps,
            workers.registers,
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(attend_0, (ctx,)), (attend_1, (ctx,)), (reduce_role, (ctx,)), (load_role, (ctx,))],
            workers.warps,
            workers.registers,
        )


DEVICE_CODE = DeviceCode(make_rings, start_roles, PRODUCTS)
