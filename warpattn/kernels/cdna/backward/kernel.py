"""Entry functions of the backward of gfx942 and gfx950: dQ, then dK and dV, then the gradients of sinks.

      queries    Q, dO held    K, V walked     delta, S, dP ─▶ dS ─▶ dQ;  numbers of the rows for the other kernel
      keys       K, V held     Q, dO walked    S, dP ─▶ P, dS ─▶ dV, dK
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...pieces.modifiers import Modifiers
from ..work_tile import find_work
from . import config as sizes
from .keys import key_gradients
from .queries import no_sink_part, query_gradients
from .work import Context, find_keys

SINK_PARTS = gl.constexpr(sizes.SINK_PARTS)


@gluon.jit
def queries_kernel(
    reads, strides, own_strides, out, statistics, numbers, results, indices, scale, shape, mask_args, score_args,
    config: gl.constexpr, functions: gl.constexpr, traits: gl.constexpr,
):  # fmt: skip
    """dq, the rows' numbers, and parts of the sinks' gradients. Arguments are the named tuples of `config`; `functions`
    are `BackwardFunctions`. Grid: (tiles of HELD query rows,)."""
    mods = Modifiers(None, False, functions.span, functions.score, mask_args, score_args)
    ctx = Context(reads, strides, numbers, shape, mods, functions.slope, scale, functions.keep, config, traits)
    work = find_work(indices, shape, gl.program_id(0), config, traits)
    if work.rows.row < work.lengths.seq_q:
        query_gradients(ctx, work, own_strides, out, statistics, results)
    elif traits.has_dsinks:
        no_sink_part(ctx, work, results.dsinks)


@gluon.jit
def keys_kernel(
    reads, strides, own_strides, numbers, results, indices, scale, shape, mask_args, score_args,
    config: gl.constexpr, functions: gl.constexpr, traits: gl.constexpr,
):  # fmt: skip
    """dk and dv; arguments as in `queries_kernel`. Grid: (tiles of HELD keys,)."""
    mods = Modifiers(None, False, functions.span, functions.score, mask_args, score_args)
    ctx = Context(reads, strides, numbers, shape, mods, functions.slope, scale, functions.keep, config, traits)
    work, key = find_keys(indices, shape, traits)
    if key < work.lengths.seq_k:
        key_gradients(ctx, work, key, own_strides, results)


@gluon.jit
def sinks_kernel(parts, dsinks, batch, heads, tiles):
    """The gradient of each head's sink from the parts of its rows [batch, heads, tiles], always in the same order.
    Grid: (heads,)."""
    layout: gl.constexpr = gl.BlockedLayout([1], [64], [4], [0])
    h = gl.program_id(0)
    total = gl.zeros([SINK_PARTS], gl.float32, layout)
    for b in range(batch):
        start = (gl.to_tensor(b).to(gl.int64) * heads + h) * tiles
        for i in range(0, tiles, SINK_PARTS):
            part = i + gl.arange(0, SINK_PARTS, layout)
            total += gl.load(parts + start + part, mask=part < tiles, other=0.0)
    gl.store(dsinks + h, gl.sum(total, 0))
