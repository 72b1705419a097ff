"""Small Hopper kernels in Gluon, each with a fault that a constexpr switches on (FAULT 0: correct)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

N: gl.constexpr = gl.constexpr(64)


@gluon.jit
def copy_kernel(x_desc, out_desc, FAULT: gl.constexpr):
    """One tile in by TMA, doubled, out by TMA, with every fault a single role can make."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.program_id(0) * N
    tile = gl.allocate_shared_memory(gl.float16, [N, N], x_desc.layout)
    result = gl.allocate_shared_memory(gl.float16, [N, N], x_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    if FAULT != "no_init":
        mbarrier.init(bar, count=1)
    if FAULT == "double_init":
        mbarrier.init(bar, count=1)
    nbytes: gl.constexpr = N * N * 2
    if FAULT == "short_expect":
        mbarrier.expect(bar, nbytes // 2)
    elif FAULT == "long_expect":
        mbarrier.expect(bar, nbytes * 2)
    elif FAULT == "no_expect":
        mbarrier.arrive(bar, count=1)
    elif FAULT == "twice_expect":
        mbarrier.expect(bar, nbytes)
        mbarrier.expect(bar, nbytes)
    else:
        mbarrier.expect(bar, nbytes)
    tma.async_load(x_desc, [row, 0], bar, tile)
    if FAULT == "wrong_parity":
        mbarrier.wait(bar, 1)
    elif FAULT != "no_wait":
        mbarrier.wait(bar, 0)
    values = result.load(layout) if FAULT == "unwritten" else tile.load(layout)
    result.store(values + values)
    if FAULT != "no_fence":
        fence_async_shared()
    tma.async_store(out_desc, [row, 0], result)
    if FAULT == "overwrite":
        result.store(values)
    if FAULT != "no_store_wait":
        tma.store_wait(0)
    if FAULT != "no_wait" and FAULT != "wrong_parity":
        mbarrier.invalidate(bar)
    if FAULT == "after_inval":
        mbarrier.wait(bar, 0)


@gluon.jit
def product_kernel(a_desc, b_desc, out, FAULT: gl.constexpr):
    """out = A·B + A·B·B with A in shared memory, then in registers."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    a = gl.allocate_shared_memory(gl.float16, [N, N], a_desc.layout)
    b = gl.allocate_shared_memory(gl.float16, [N, N], b_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 2 * N * N * 2)
    tma.async_load(a_desc, [0, 0], bar, a)
    tma.async_load(b_desc, [0, 0], bar, b)
    mbarrier.wait(bar, 0)
    first = warpgroup_mma(a, b, gl.zeros([N, N], gl.float32, layout), use_acc=False, is_async=True)
    first = warpgroup_mma_wait(1 if FAULT == "loose_wait" else 0, deps=(first,))
    p = gl.convert_layout(first.to(gl.float16), operand)
    total = warpgroup_mma(p, b, first, is_async=True)
    if FAULT == "overwrite":
        b.store(gl.zeros([N, N], gl.float16, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
    total = warpgroup_mma_wait(0, deps=(total,))
    rows = gl.arange(0, N, gl.SliceLayout(1, layout))
    cols = gl.arange(0, N, gl.SliceLayout(0, layout))
    gl.store(out + rows[:, None] * N + cols[None, :], total)


@gluon.jit
def ahead_kernel(x, y, out, FAULT: gl.constexpr):
    """out = x + y where the preceding launch may still write y; it reads y before the wait too, as a hint."""
    at = gl.arange(0, 64, gl.BlockedLayout([1], [32], [4], [0]))
    before = gl.load(x + at)
    guess = gl.load(y + at, volatile=FAULT != "guesses by ordinary loads")
    if gl.sum(guess, 0) > 0:
        gdc_launch_dependents()
    if FAULT != "no wait":
        gdc_wait()
    if FAULT == "believes its guess":
        gl.store(out + at, before + guess)
    else:
        gl.store(out + at, before + gl.load(y + at))


@gluon.jit
def produce(x_desc, ring, full, empty, tiles, FAULT: gl.constexpr):
    for i in range(tiles):
        slot = i % 2
        turn = (i // 2) & 1
        if FAULT != "no_empty_wait":
            mbarrier.wait(empty.index(slot), turn ^ 1)
        mbarrier.expect(full.index(slot), N * N * 2)
        tma.async_load(x_desc, [i * N, 0], full.index(slot), ring.index(slot))


@gluon.jit
def consume(out, ring, full, empty, tiles, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    total = gl.zeros([N, N], gl.float32, layout)
    for i in range(tiles):
        slot = i % 2
        turn = (i // 2) & 1
        if FAULT == "one_turn":
            mbarrier.wait(full.index(slot), 0)
        elif FAULT != "no_full_wait":
            mbarrier.wait(full.index(slot), turn)
        if FAULT == "early_release":
            mbarrier.arrive(empty.index(slot), count=1)
        total += ring.index(slot).load(layout).to(gl.float32)
        if FAULT == "lost_arrive":
            mbarrier.arrive(empty.index(slot), count=1, pred=i != 1)
        elif FAULT == "extra_arrive":
            mbarrier.arrive(empty.index(slot), count=2)
        elif FAULT != "early_release":
            mbarrier.arrive(empty.index(slot), count=1)
    rows = gl.arange(0, N, gl.SliceLayout(1, layout))
    cols = gl.arange(0, N, gl.SliceLayout(0, layout))
    gl.store(out + rows[:, None] * N + cols[None, :], total)


@gluon.jit
def ring_kernel(x_desc, out, tiles, FAULT: gl.constexpr):
    """A ring of two slots between a producer warp and a consumer warpgroup: the sum of all tiles."""
    ring = gl.allocate_shared_memory(gl.float16, [2, N, N], x_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=2)
    empty = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2 if FAULT == "count" else 1)
    fence_async_shared()
    gl.warp_specialize(
        [(consume, (out, ring, full, empty, tiles, FAULT)), (produce, (x_desc, ring, full, empty, tiles, FAULT))],
        [1],
        [24],
    )


@gluon.jit
def write_tile(tile, out_desc, bar, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile.store(gl.full([N, N], 3.0, gl.float16, layout))
    if FAULT != "no_fence":
        fence_async_shared()
    if FAULT == "named":
        gl.inline_asm("bar.arrive 12, 160;")
    elif FAULT == "named_compilers":
        gl.inline_asm("bar.arrive 2, 160;")
    elif FAULT == "named_beyond":
        gl.inline_asm("bar.arrive 16, 160;")
    elif FAULT == "named_counts":
        gl.inline_asm("bar.arrive 12, 512;")
    elif FAULT != "no_arrive":
        mbarrier.arrive(bar, count=1)


@gluon.jit
def send_tile(tile, out_desc, bar, FAULT: gl.constexpr):
    if FAULT == "named" or FAULT == "named_counts":
        gl.inline_asm("bar.sync 12, 160;")
    elif FAULT == "named_compilers":
        gl.inline_asm("bar.sync 2, 160;")
    elif FAULT == "named_beyond":
        gl.inline_asm("bar.sync 16, 160;")
    elif FAULT != "no_wait":
        mbarrier.wait(bar, 0)
    tma.async_store(out_desc, [0, 0], tile)
    tma.store_wait(0)


@gluon.jit
def handover_kernel(out_desc, FAULT: gl.constexpr):
    """One role writes a tile with ordinary stores, another one sends it by TMA."""
    tile = gl.allocate_shared_memory(gl.float16, [N, N], out_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    gl.warp_specialize(
        [(write_tile, (tile, out_desc, bar, FAULT)), (send_tile, (tile, out_desc, bar, FAULT))], [1], [24]
    )


@gluon.jit
def box_kernel(x_desc, out_desc, c0, c1, RANK: gl.constexpr):
    """A box of any rank in and out again, clipped on both ways."""
    tile = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_type.shape, x_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    if RANK == 1:
        tma.async_load(x_desc, [c0], bar, tile)
    elif RANK == 2:
        tma.async_load(x_desc, [c0, c1], bar, tile)
    elif RANK == 3:
        tma.async_load(x_desc, [0, c0, c1], bar, tile)
    elif RANK == 4:
        tma.async_load(x_desc, [0, c0, 0, c1], bar, tile)
    else:
        tma.async_load(x_desc, [0, 0, c0, 0, c1], bar, tile)
    mbarrier.wait(bar, 0)
    if RANK == 1:
        tma.async_store(out_desc, [c0], tile)
    elif RANK == 2:
        tma.async_store(out_desc, [c0, c1], tile)
    elif RANK == 3:
        tma.async_store(out_desc, [0, c0, c1], tile)
    elif RANK == 4:
        tma.async_store(out_desc, [0, c0, 0, c1], tile)
    else:
        tma.async_store(out_desc, [0, 0, c0, 0, c1], tile)
    tma.store_wait(0)


@gluon.jit
def views_kernel(x, out):
    """Index, slice, transpose, reshape and reinterpretation of shared memory are views on the same bytes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
    smem = gl.allocate_shared_memory(gl.int32, [2, 32, 32], plain)
    smem.index(0).store(gl.load(x + rows * 32 + cols))
    smem.index(1).store(gl.load(x + rows * 32 + cols) + 1)
    gl.store(out + rows * 32 + cols, smem.index(1).permute((1, 0)).load(layout))
    half = smem.index(0).slice(16, 16, 0)
    half_rows = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    gl.store(out + 1024 + half_rows * 32 + cols, half.load(layout))
    bits = smem.index(0).reinterpret(gl.float32, [32, 32], plain)
    gl.store(out + 2048 + rows * 32 + cols, bits.load(layout).to(gl.int32, bitcast=True))


@gluon.jit
def greater(a, b):
    return a if a > b else a * 2 + b


@gluon.jit
def map_kernel(x, y, out):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout)
    gl.store(out + i, gl.map_elementwise(greater, gl.load(x + i), gl.load(y + i)))


@gluon.jit
def asm_kernel(x, out, TEXT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout)
    y = gl.inline_asm_elementwise(TEXT, "=f,f", [gl.load(x + i)], gl.float32, is_pure=True, pack=1)
    gl.store(out + i, y)


@gluon.jit
def word_kernel(out, WRITE: gl.constexpr):
    """The first word of a tile of which at most that is written, and with "next" the whole tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tile = gl.allocate_shared_memory(gl.float16, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if WRITE != "nothing":
        gl.inline_asm("st.shared.b32 [$0], $1;", "r,r", [tile, gl.to_tensor(7)])
    word = gl.inline_asm("ld.shared.b32 $0, [$1];", "=r,r", [tile], gl.int32)
    if word == 7:
        gl.store(out, word)
    if WRITE == "next":
        gl.store(out + gl.arange(0, 64, layout), tile.load(layout).to(gl.int32))


@gluon.jit
def only_element_kernel(x, out):
    """The halves of a 64-bit number, which is the only element of a tensor."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    word = gl.load(x + gl.arange(0, 1, layout)).reshape([])
    gl.store(out, ((word >> 32) & 0xFFFFFFFF).to(gl.int32))
    gl.store(out + 1, (word & 0xFFFFFFFF).to(gl.int32))


STORE_WORDS = gl.constexpr("{ .reg .b32 at; mad.lo.u32 at, $1, 4, $0; st.shared.b32 [at], $1; }")


@gluon.jit
def own_words_kernel(out, FENCE: gl.constexpr, BARRIER: gl.constexpr):
    """A tile to which each thread stores a word by assembly, out by TMA; Triton only knows of stores to rows behind."""
    rows: gl.constexpr = out.block_type.shape[0]
    tile = gl.allocate_shared_memory(gl.int32, [rows, 4], out.layout)
    if rows > 32:
        tile.slice(32, 32).store(gl.zeros([32, 4], gl.int32, gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])))
    gl.inline_asm(STORE_WORDS, "r,r", [tile.slice(0, 32), gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))])
    if FENCE:
        fence_async_shared()
    if BARRIER:
        gl.barrier()
    tma.async_store(out, [0, 0], tile)
    tma.store_wait(0)
