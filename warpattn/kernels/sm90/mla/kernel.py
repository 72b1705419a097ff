"""Hopper decode for latent attention (MLA, absorbed): queries of 576 on keys [latent 512 | rotary 64], whose first 512
columns are the values.

      producer warp      key tiles by TMA, once for keys and values ──▶ ring in shared memory     (mla/load.py)
      warpgroups 0, 1    all scores, half of the output's columns each                            (mla/attend.py)
                         whole heads ──▶ output, parts ──▶ workspace ──▶ second kernel            (decode/combine.py)

Everything about shares, masks and parts is decode's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...pieces.combine import Partials
from ...pieces.modifiers import Modifiers
from ..decode.combine import leave_programs
from ..decode.context import Keys, Matrix, Results, grid_of, take_share
from .attend import mla_attend_role
from .context import MlaContext, make_mla_rings
from .load import mla_load_role


@gluon.jit
def attend_left(ctx):
    mla_attend_role(ctx, 0)


@gluon.jit
def attend_right(ctx):
    mla_attend_role(ctx, 1)


@gluon.jit
def mla_kernel(
    k,
    v,
    q,
    out,
    keys,
    workspace,
    lse_ptr,
    sinks_ptr,
    scale,
    shape,
    mask_args,
    score_args,
    config: gl.constexpr,
    functions: gl.constexpr,
    has_sinks: gl.constexpr,
    has_lse: gl.constexpr,
):
    """Arguments and grid as in `decode_kernel`; of `k` only the rotary columns are read, the others through `v`."""
    work = grid_of(shape)
    mods = Modifiers(functions[0], functions[1], functions[2], mask_args, score_args)
    stored = Keys(k, v, keys[0], keys[1], keys[2], False)
    partials = Partials(workspace[0], workspace[1], workspace[2], config.padded_v)
    results = Results(Matrix(out[0], out[1], out[2], out[3]), lse_ptr, sinks_ptr, partials, workspace[3])
    rings = make_mla_rings(config)
    fence_async_shared()
    shares, start = take_share(stored, work, mods, config)
    end = shares.first(gl.program_id(0) + 1)
    leave_programs(workspace[3], work)
    queries = Matrix(q[0], q[1], q[2], q[3])
    ctx = MlaContext(queries, stored, results, rings, work, mods, shares, start, end, scale, config, has_sinks, has_lse)
    gl.warp_specialize(
        [(attend_left, (ctx,)), (attend_right, (ctx,)), (mla_load_role, (ctx,))],
        [4, 1],
        [config.consumer_registers, config.producer_registers],
    )
