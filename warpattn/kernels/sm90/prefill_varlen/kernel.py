"""Hopper prefill of ragged batches and paged caches: the dense kernel's roles on tiles that bring their lengths along.

      order_kernel         lengths ──▶ list of query blocks, longest first          (pieces/order_kernel.py)
      lengths_kernel       load.py, prefill/attend.py, epilogue.py as they are, with
          LengthWork       tiles from the list                                      (pieces/scheduler_varlen.py)
          ClippedRows      rows of one sequence, clipped at its end                 (nvidia/clipped_rows.py)
          PagedKeys        or keys page by page                                     (paged_keys.py)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...nvidia.clipped_rows import ClippedRows
from ...pieces.modifiers import Modifiers
from ...pieces.scheduler_varlen import BLOCKS, COUNTER, LENGTH_TILE_FIELDS, RECORD, LengthWork
from ..prefill.context import Context, make_rings
from ..prefill.kernel import start_roles
from .paged_keys import CopiedKeys, PagedKeys, Table


@gluon.aggregate
class RaggedKeys:
    """K or V rows of sequences that lie end to end."""

    rows: ClippedRows

    @gluon.jit
    def load(self, ctx, ring, state, tile, key_tile, nbytes: gl.constexpr):
        """One key tile of the key head of `tile` into a slot."""
        full = ring.producer_acquire(state)
        mbarrier.expect(full, nbytes)
        first, head = key_tile * ctx.config.block_n, tile.h // ctx.work.group
        self.rows.load(tile.k_start, tile.seq_k, first, head, full, ring.tile(state))


@gluon.aggregate
class LengthTensors:
    """Operands in global memory, see `context.Tensors`."""

    q: ClippedRows
    k: RaggedKeys | PagedKeys | CopiedKeys
    v: RaggedKeys | PagedKeys | CopiedKeys
    o: ClippedRows
    lse: gl.tensor
    sinks: gl.tensor
    counter: gl.tensor

    @gluon.jit
    def load_queries(self, tile, row, full, smem):
        """Queries from `row` on of a tile's head into shared memory."""
        self.q.load(tile.q_start, tile.seq_q, row, tile.h, full, smem)

    @gluon.jit
    def store_output(self, tile, row, column: gl.constexpr, smem):
        """Rows from `row` on of a tile's output, from `column` on, out of shared memory."""
        self.o.store(tile.q_start, tile.seq_q, row, tile.h, column, smem)


@gluon.jit
def lengths_kernel(
    q_desc,
    o_desc,
    k_source,
    v_source,
    list_ptr,
    table_ptr,
    lse_ptr,
    sinks_ptr,
    scale,
    shape,
    mask_args,
    score_args,
    form: gl.constexpr,
    functions: gl.constexpr,
    has_sinks: gl.constexpr,
    has_lse: gl.constexpr,
):
    """Attention forward of a ragged batch or over a paged cache.

    `k_source` and `v_source` are (descriptor, step, unit), see `ClippedRows`, or (pointer, strides of page, row and
    head in runs of 8 elements) if `form.box` is 0; `shape` is (heads_q, group, section, lse_batch, lse_head, and step
    and unit of the queries and of the output, table row, pages), see `LengthWork` and `Table`; `list_ptr` is what
    order_kernel wrote. Grid: any number of CTAs up to the number of tiles.
    """
    blocks = gl.load(list_ptr + BLOCKS)
    work = LengthWork(shape[0], shape[1], shape[2], shape[3], shape[4], blocks, list_ptr + RECORD)
    k, v = key_sources(k_source, v_source, Table(table_ptr, shape[9], shape[10], form.page_size), form)
    q, o = ClippedRows(q_desc, shape[5], shape[6]), ClippedRows(o_desc, shape[7], shape[8])
    tensors = LengthTensors(q, k, v, o, lse_ptr, sinks_ptr, list_ptr + COUNTER)
    mods = Modifiers(functions[0], functions[1], functions[2], mask_args, score_args)
    rings = make_rings(form.tiles, LENGTH_TILE_FIELDS, clipped=True)
    ctx = Context(tensors, rings, work, mods, scale, form.tiles, has_sinks, has_lse)
    fence_async_shared()
    if gl.program_id(0) < work.total():  # the grid is made without knowing the lengths
        start_roles(ctx)


@gluon.jit
def key_sources(k, v, table, form: gl.constexpr):
    """K and V by the kind of their sequence."""
    if form.page_size == 0:
        return RaggedKeys(ClippedRows(k[0], k[1], k[2])), RaggedKeys(ClippedRows(v[0], v[1], v[2]))
    elif form.box > 0:
        k_rows, v_rows = ClippedRows(k[0], k[1], k[2]), ClippedRows(v[0], v[1], v[2])
        return PagedKeys(k_rows, table, form.box), PagedKeys(v_rows, table, form.box)
    else:
        k_keys = CopiedKeys(k[0], k[1], k[2], k[3], table, form.tiles.dim_qk)
        return k_keys, CopiedKeys(v[0], v[1], v[2], v[3], table, form.tiles.dim_v)
