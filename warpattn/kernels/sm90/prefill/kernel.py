"""Hopper prefill: one producer warp and one to four consumer warpgroups in a persistent, warp-specialised kernel.

producer warp      Q, K, V by TMA ──▶ rings in shared memory          (load.py)
warpgroup 0..n-1   wgmma + softmax on 64 rows each, TMA store of O    (attend.py, epilogue.py)
one warpgroup      at the end: tiles with NaN or infinity, again      (nonfinite.py, recompute.py)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...nvidia.opaque import hide_from_compiler
from ...nvidia.shared_role import begin_shared, end_shared, run_shared
from ...pieces.modifiers import modifiers
from ...pieces.scales import softmax_scale
from ...pieces.scheduler import TILE_FIELDS, Work
from ...pieces.scheduler_split import SPLIT_TILE_FIELDS, SplitWork
from .attend import attend_role, turn_pass
from .context import LEFT, Context, KeyRows, Tensors, make_rings
from .eight_bit.convert import convert_role
from .eight_bit.rings import ValueColumns
from .load import load_role
from .nonfinite import poke
from .recompute import end_role, recompute_tiles


@gluon.jit
def attend(ctx, number: gl.constexpr):
    """Runs consumer warpgroup `number`; with a mask, it then waits until outputs that recompute.py reads are stored.

    With one copy of the code (runtime/shared_code) the first one's is compiled, and the others run it. Where that may
    be, the number is hidden from the compiler, which would otherwise specialise the code for it.
    """
    config: gl.constexpr = ctx.config
    if number == config.consumers - 1:
        turn_pass(number, config)
    if config.one_copy and number > 0:
        run_shared(number)
    else:
        wg = number
        if config.one_copy:
            wg = begin_shared()
        elif config.may_share_code:
            wg = hide_from_compiler(number)
        attend_role(ctx, wg)
        if ctx.mods.keep is not None:
            end_role(ctx, wg)
        if config.one_copy:
            end_shared()


@gluon.jit
def attend_0(ctx):
    attend(ctx, 0)


@gluon.jit
def attend_1(ctx):
    attend(ctx, 1)


@gluon.jit
def attend_2(ctx):
    attend(ctx, 2)


@gluon.jit
def attend_3(ctx):
    attend(ctx, 3)


@gluon.jit
def prefill_kernel(
    q_maps, k_maps, v_maps, o_maps, lse_ptr, sinks_ptr, counter_ptr, scale, shape, mask_args, score_args,
    config: gl.constexpr, functions: gl.constexpr, has_sinks: gl.constexpr, has_lse: gl.constexpr,
):  # fmt: skip
    """Attention forward of a dense problem.

    `q_maps`, `k_maps`, `v_maps` and `o_maps` have a TMA descriptor for each part of the head dim. `shape` is a
    `PrefillShape`, or, if `config.split`, a `SplitShape`; outputs and LSE are then partial ones in a workspace.
    `functions` are those of `Modifiers`. Grid: any number of CTAs up to the number of tiles.
    """
    work = work_of(shape, config)
    mods = modifiers(functions, mask_args, score_args)
    keys, values = KeyRows(k_maps, 0), value_source(v_maps, config)
    tensors = Tensors(q_maps, keys, values, o_maps, lse_ptr, sinks_ptr, counter_ptr, config.first_value)
    fields: gl.constexpr = SPLIT_TILE_FIELDS if config.split else TILE_FIELDS
    rings = make_rings(config, fields)
    fence_async_shared()  # TMA sees the new barriers
    gdc_wait()  # the preceding kernels have ended and their writes are visible
    if not config.split:  # CTAs of a combining kernel would gather on the few idle SMs
        gdc_launch_dependents()
    early: gl.constexpr = has_lse or config.products
    ctx = Context(tensors, rings, work, mods, softmax_scale(scale, config), scale, config, has_sinks, has_lse, early)
    start_roles(ctx)


@gluon.jit
def value_source(maps, config: gl.constexpr):
    """What loads V, which 8-bit products need transposed."""
    if config.products:
        return ValueColumns(maps)
    else:
        return KeyRows(maps, config.first_value)


@gluon.jit
def work_of(shape, config: gl.constexpr):
    """The scheduler of a `PrefillShape` or `SplitShape`."""
    if config.split:
        return SplitWork(
            shape.seq_q, shape.seq_k, shape.heads_q, shape.group, shape.m_tiles, shape.heads, shape.section,
            config.packed, shape.batch, shape.splits,
        )  # fmt: skip
    else:
        return Work(
            shape.seq_q, shape.seq_k, shape.heads_q, shape.group, shape.m_tiles, shape.heads, shape.section,
            config.packed,
        )  # fmt: skip


@gluon.jit
def start_roles(ctx):
    """Runs every role in its warps; the topology lists them in the same order."""
    workers: gl.constexpr = ctx.config.topology.workers
    if ctx.mods.keep is not None:
        for wg in gl.static_range(LEFT):
            poke(ctx.rings.left.index(wg), -1)
    first: gl.constexpr = 0 if ctx.config.converts else 1
    gl.warp_specialize(
        [(attend_0, (ctx,)), (attend_1, (ctx,)), (attend_2, (ctx,)), (attend_3, (ctx,))][: ctx.config.consumers]
        + [(convert_role, (ctx,)), (load_role, (ctx,))][first:],
        workers.warps,
        workers.registers,
    )
    if ctx.mods.keep is not None:
        recompute_tiles(ctx)
