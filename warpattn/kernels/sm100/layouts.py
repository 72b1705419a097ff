"""Register, shared-memory and tensor-memory layouts of the Blackwell kernels, derived from a config."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout

from . import traits

STORE_COLUMNS = gl.constexpr(traits.STORE_COLUMNS)


@gluon.constexpr_function
def element_type(dtype: str):
    """Gluon's type of operands, and of parts of an output (fp32)."""
    return {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}[dtype]


@gluon.constexpr_function
def query_box(config, cols):
    """Box of one query tile: rows are (query, head of the group), a head of its own where heads are not fused."""
    heads = config.tile_heads
    return [1, config.BM_q // heads, heads, cols]


@gluon.constexpr_function
def slot_box(config):
    """A slot that K and V tiles take in turn: a tile, or the column blocks of the wider where head dims differ."""
    qk, ov = config.padded_qk_depth, config.padded_ov_depth
    return [1, config.BN, 1, qk] if qk == ov else [max(qk, ov) // 64, 1, config.BN, 1, 64]


@gluon.constexpr_function
def stacked(count, box):
    """`count` boxes, one after the other."""
    return [count, *box]


@gluon.constexpr_function
def box_layout(box, dtype):
    """Swizzled layout of a box as TMA writes it and the tensor core reads it."""
    return gl.NVMMASharedLayout.get_default_for(list(box), dtype)


@gluon.constexpr_function
def lanes(cols):
    """Tensor memory of 128 rows, a lane each, and `cols` columns side by side."""
    return TensorMemoryLayout([128, cols], 1)


@gluon.constexpr_function
def row_layout():
    """One value for each of 128 rows: thread t of the warpgroup has row t, as 32-lane loads of tensor memory give."""
    return gl.BlockedLayout([1], [32], [4], [0])
