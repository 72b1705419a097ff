"""Register, shared-memory and tensor-memory layouts of the Blackwell kernels, derived from a config.

In a pair of CTAs each has half of every box: of its rows, or of its columns for V.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout

from ..pieces.element_type import element_type as element_type
from . import traits

STORE_COLUMNS = gl.constexpr(traits.STORE_COLUMNS)
ROWS, COLUMNS = 1, 3  # dimensions of a box


@gluon.constexpr_function
def query_box(config, cols):
    """Box of one query tile: rows are (query, head of the group), a head of its own where heads are not fused."""
    heads = config.tile_heads
    return [1, config.MMA_M // heads, heads, cols]


@gluon.constexpr_function
def key_box(config, cols):
    """Box of a key tile, or of some of its columns."""
    return [1, config.BN, 1, cols]


@gluon.constexpr_function
def slot_box(config):
    """A slot that K and V tiles take in turn: a tile, or the column blocks of the wider where head dims differ."""
    qk, ov = config.padded_qk_depth, config.padded_ov_depth
    return key_box(config, qk) if qk == ov else [max(qk, ov) // 64, *key_box(config, 64)]


@gluon.constexpr_function
def box_layout(box, dtype, halved=None):
    """Swizzled layout of a box as TMA writes it and the tensor core reads it; a pair's CTAs have halves of dimension
    `halved`."""
    if halved is None:
        return gl.NVMMASharedLayout.get_default_for(list(box), dtype)
    half = [[int(dim == halved) for dim in range(len(box))]]
    return gl.NVMMASharedLayout.get_default_for(list(box), dtype, cga_layout=half)


@gluon.constexpr_function
def halved_rows(config):
    """The dimension of which each CTA has half, in boxes of queries, keys and the output; None for a single CTA."""
    return ROWS if config.pair_cta else None


@gluon.constexpr_function
def halved_columns(config):
    """As `halved_rows`, for boxes of values."""
    return COLUMNS if config.pair_cta else None


@gluon.constexpr_function
def lanes(config, cols):
    """Tensor memory of 128 rows, a lane each, and `cols` columns side by side; of 256 rows, 128 in each CTA of a
    pair."""
    return TensorMemoryLayout([128, cols], 1, [[1, 0]], True) if config.pair_cta else TensorMemoryLayout([128, cols], 1)


@gluon.constexpr_function
def scale_layout(config):
    """Shared memory of one value a row, in each CTA for its own rows."""
    return gl.SwizzledSharedLayout(1, 1, 1, [0], [[1]]) if config.pair_cta else gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.constexpr_function
def row_layout():
    """One value for each of 128 rows: thread t of the warpgroup has row t, as 32-lane loads of tensor memory give."""
    return gl.BlockedLayout([1], [32], [4], [0])
