"""Hopper decode: a few query tokens attend to long sequences, whose keys are partitioned over all SMs.

      producer warp   K, V by TMA ──▶ rings in shared memory                              (load.py)
      warpgroup       wgmma + softmax on 64 rows = tokens × heads of a group              (attend.py)
                      or, with swap-AB, on 8, 16 or (8-bit keys) 32 rows, keys left   (attend_swap_ab.py)
                      whole heads ──▶ output, parts ──▶ workspace, last CTA combines      (output.py, output_swap_ab.py)

The grid is fixed; each CTA computes its range of keys from the lengths on the device (schedule.py). With PDL a CTA may
start before the preceding kernel ends. It prefetches keys to L2 (prefetch.py) and waits with griddepcontrol.wait before
it touches memory that the preceding kernel may write: all memory, or, with a settled cache, all but older keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from ...pieces.modifiers import modifiers
from ...pieces.stream_k import my_queue
from .attend import attend_role
from .attend_swap_ab import attend_swap_ab_role
from .context import DecodeContext, key_cache, make_decode_rings, make_results, matrix, scales_of
from .load import load_role
from .prefetch import prefetch_range
from .schedule import my_range, queue_count


@gluon.jit
def consumer_role(ctx):
    """The consumer warpgroup, with or without swap-AB."""
    if ctx.config.overlap.kv_ready_before_dependency:
        gdc_wait()
    if ctx.config.swap_ab is not None:
        attend_swap_ab_role(ctx)
    else:
        attend_role(ctx)


@gluon.jit
def decode_kernel(
    k, v, q, out, keys, workspace, lse_ptr, sinks_ptr, scale, shape, mask_args, score_args,
    config: gl.constexpr, functions: gl.constexpr, has_sinks: gl.constexpr, has_lse: gl.constexpr,
):  # fmt: skip
    """Attention forward of a few query tokens per sequence.

    q, out: `StridedRows`. k, v: `MappedRows`, or `StridedRows` if the config gathers. keys: `KeyIndex`. workspace:
    `PartialResults`. shape: `DecodeShape`. functions: `Functions`, see `Modifiers`. Grid: any number of CTAs
    that the workspace has slots for.
    """
    mods = modifiers(functions, mask_args, score_args)
    stored = key_cache(k, v, keys)
    results = make_results(out, lse_ptr, sinks_ptr, workspace, config)
    rings = make_decode_rings(config)
    fence_async_shared()
    if config.overlap.prefetch_tiles > 0:
        prefetch_range(stored.speculative_view(), shape, mods, config)
    if config.overlap.pdl and not config.overlap.kv_ready_before_dependency:
        gdc_wait()
    queue = my_queue(queue_count(shape, config))
    stream_k, start = my_range(queue, stored, shape, mods, config)
    end = stream_k.first(queue.cta + 1)
    ctx = DecodeContext(
        matrix(q), scales_of(q, config), stored, results, rings, shape, mods, queue, stream_k, start, end, scale,
        config, has_sinks, has_lse,
    )  # fmt: skip
    workers: gl.constexpr = config.topology.workers
    gl.warp_specialize([(consumer_role, (ctx,)), (load_role, (ctx,))], workers.warps, workers.registers)
