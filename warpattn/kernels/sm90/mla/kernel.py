"""Hopper decode for latent attention (MLA, absorbed): queries and keys have 576 columns [latent 512 | rotary 64], and a
key's first 512 columns are its value.

      producer warp      key tiles by TMA, once for keys and values ──▶ rings in shared memory    (load.py)
      warpgroup 2        scores and probabilities of every key tile                               (attend.py)
      warpgroups 0, 1    P·V for half of the output's columns each
                         whole heads ──▶ output, parts ──▶ workspace ──▶ second kernel            (decode/combine.py)

Schedule, masks and parts are those of decode.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...pieces.modifiers import modifiers
from ...pieces.stream_k import my_queue
from ..decode.context import DecodeContext, key_cache, make_results
from ..decode.schedule import my_range, queue_count
from .attend import scores_role, values_role
from .attend_swap_ab import attend_swap_ab_role
from .context import latent_queries, make_mla_rings, make_swap_ab_rings
from .eight_bit import load_latents
from .load import load_tiles


@gluon.jit
def load_role(ctx):
    if ctx.config.latents is None:
        load_tiles(ctx)
    else:
        load_latents(ctx)


@gluon.jit
def make_rings(config: gl.constexpr):
    if config.swap_ab:
        return make_swap_ab_rings(config)
    else:
        return make_mla_rings(config)


@gluon.jit
def mla_kernel(
    k, v, q, out, keys, workspace, lse_ptr, sinks_ptr, scale, shape, mask_args, score_args,
    config: gl.constexpr, functions: gl.constexpr, has_sinks: gl.constexpr, has_lse: gl.constexpr,
):  # fmt: skip
    """Arguments and grid as in `decode_kernel`; q may also be a `LatentQueryArgs`. `k` gives the rotary parts, `v` the
    latents."""
    mods = modifiers(functions, mask_args, score_args)
    stored = key_cache(k, v, keys)
    results = make_results(out, lse_ptr, sinks_ptr, workspace, config)
    rings = make_rings(config)
    fence_async_shared()
    queue = my_queue(queue_count(shape, config))
    stream_k, start = my_range(queue, stored, shape, mods, config)
    end = stream_k.first(queue.cta + 1)
    queries = latent_queries(q, config)
    ctx = DecodeContext(
        queries, (), stored, results, rings, shape, mods, queue, stream_k, start, end, scale, config, has_sinks, has_lse
    )
    workers: gl.constexpr = config.topology.workers
    if config.swap_ab:
        gl.warp_specialize([(attend_swap_ab_role, (ctx,)), (load_tiles, (ctx,))], workers.warps, workers.registers)
    else:
        gl.warp_specialize(
            [(values_role, (ctx, 0)), (values_role, (ctx, 1)), (scores_role, (ctx,)), (load_role, (ctx,))],
            workers.warps, workers.registers,
        )  # fmt: skip
