"""Entry functions of gfx942 and gfx950: attention by four waves on one tile of rows, and the combination of parts.

Prefill and decode are one kernel with different configs: 32 x 32 MFMA and waves side by side along the rows; or 16 x 16
MFMA, waves along the keys, the heads of a group packed into the rows, and the keys split into partitions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..pieces.modifiers import Modifiers
from ..pieces.scales import scores_scale
from .attend import attend
from .epilogue import combine_parts
from .work_tile import Tensors, find_work, two_tensors


@gluon.aggregate
class Context:
    """What every step of a workgroup reads."""

    tensors: Tensors
    shape: gl.tuple  # Shape, see `config`
    mods: Modifiers  # without its `keep`: see `keeps`
    scale: gl.tensor  # softmax scale, fp32, times that of 8-bit keys
    scales: gl.base_value  # `Scales` of 8-bit keys and values
    keeps: gl.tuple  # the mask's conditions, (of an element, of a tile or None) each, see `signature.keep_functions`
    again: gl.tuple  # `Again` under a mask, else ()
    config: gl.constexpr
    traits: gl.constexpr


@gluon.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, indices, scale, strides, shape, mask_args, score_args, sinks_ptr, o_ptr, lse_ptr,
    again, config: gl.constexpr, functions: gl.constexpr, traits: gl.constexpr,
):  # fmt: skip
    """Attention forward. `q_ptr` and `k_ptr` may be a `LatentArgs`. `indices`, `strides` and `shape` are the named
    tuples of `config`; `scale` is the softmax scale, or `Scales` with 8-bit keys and values; `functions` are those of
    `Modifiers`, with the conditions of the mask (`signature.keep_functions`) as `keep`; `again` is an `Again` under a
    mask, else ().

    Grid: (tiles, partitions). With `traits.partial`, o and lse are workspace: [partitions * tiles, M, padded Dv] and
    [partitions * tiles, M], fp32.

    Arguments that are used after the loop are last: the first ones (14 scalars on gfx942, 8 on gfx950) are loaded
    before the kernel begins and held until their last use, all others are loaded at their use.
    """
    q, q_rope = two_tensors(q_ptr, traits.own_rope)
    k, k_rope = two_tensors(k_ptr, config.rope is not None)
    tensors = Tensors(q, k, v_ptr, o_ptr, lse_ptr, sinks_ptr, indices, strides, q_rope, k_rope)
    mods = Modifiers(None, False, functions.span, functions.score, mask_args, score_args)
    work = find_work(indices, shape, gl.program_id(0), config, traits)
    scores = scores_scale(scale, work.kv_head, mods, config)
    ctx = Context(tensors, shape, mods, scores, scale, functions.keep, again, config, traits)
    if work.rows.row < work.lengths.seq_q:
        attend(ctx, work)


@gluon.jit
def combine_kernel(
    o_parts, denominators, o_ptr, lse_ptr, sinks_ptr, indices, strides, shape,
    config: gl.constexpr, traits: gl.constexpr,
):  # fmt: skip
    """Combine the parts of a tile. Grid: (tiles, blocks of `config.combine_rows` rows); arguments as in
    `attention_kernel`."""
    tensors = Tensors(o_ptr, o_ptr, o_ptr, o_ptr, lse_ptr, sinks_ptr, indices, strides, (), ())
    work = find_work(indices, shape, gl.program_id(0), config, traits)
    if work.rows.row < work.lengths.seq_q:
        combine_parts(tensors, shape, work, o_parts, denominators, config, traits)
