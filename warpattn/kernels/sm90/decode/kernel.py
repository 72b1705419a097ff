"""Hopper decode: a few query tokens against long keys, shared out over all SMs whatever the lengths are.

      producer warp   K, V by TMA ──▶ rings in shared memory                        (decode/load.py)
      warpgroup       wgmma + softmax on 64 rows = tokens × heads of a group        (decode/attend.py)
                      or on 8 or 16, if there are no more, with keys on the left    (decode/attend_swap_ab.py)
                      whole heads ──▶ output, parts ──▶ workspace, last one combines  (decode/output.py,
                                                                       few rows: decode/output_swap_ab.py)

The grid is fixed; each CTA computes its share from the lengths on the device (stream_k.py). CTAs may come while the
launch in front of theirs still runs (programmatic dependent launch). They wait for its end before they read or write
anything that it may write: everything, or, if the cache is settled, all but older keys and values. Before that they ask
for keys in L2 (decode/prefetch.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_wait

from ...pieces.combine import Partials
from ...pieces.modifiers import Modifiers
from .attend import decode_attend_role
from .attend_swap_ab import few_attend_role
from .combine import leave_programs
from .context import DecodeContext, Keys, Matrix, Results, grid_of, make_decode_rings, take_share
from .load import decode_load_role
from .prefetch import prefetch_share


@gluon.jit
def attend_role(ctx):
    """The warpgroup: queries on the right of keys, or on the left."""
    if ctx.config.settled:
        gdc_wait()
    if ctx.config.combine_apart:
        leave_programs(ctx.results.tickets, ctx.work)
    if ctx.config.few_rows > 0:
        few_attend_role(ctx)
    else:
        decode_attend_role(ctx)


@gluon.jit
def decode_kernel(
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
    """Attention of a few query tokens.

    q, out: (pointer, strides of batch, token, head in units of 8 elements). k, v: (descriptor,), or the same.
    keys: (lengths, table, its row stride). workspace: (partial outputs, partial log2 denominators, rows of a slot,
    tickets). shape: see `Grid`. functions: (keep, span, score), see `Modifiers`. Grid: any number of CTAs that the
    workspace has slots for.
    """
    work = grid_of(shape)
    mods = Modifiers(functions[0], functions[1], functions[2], mask_args, score_args)
    stored = Keys(k, v, keys[0], keys[1], keys[2], False)
    partials = Partials(workspace[0], workspace[1], workspace[2], config.padded_v)
    results = Results(Matrix(out[0], out[1], out[2], out[3]), lse_ptr, sinks_ptr, partials, workspace[3])
    rings = make_decode_rings(config)
    fence_async_shared()
    if config.prefetched > 0:
        prefetch_share(stored.now(), work, mods, config)
    if config.ahead and not config.settled:
        gdc_wait()
    shares, start = take_share(stored, work, mods, config)
    end = shares.first(gl.program_id(0) + 1)
    queries = Matrix(q[0], q[1], q[2], q[3])
    ctx = DecodeContext(
        queries, stored, results, rings, work, mods, shares, start, end, scale, config, has_sinks, has_lse
    )
    gl.warp_specialize([(attend_role, (ctx,)), (decode_load_role, (ctx,))], [1], [config.producer_registers])
