"""Right kernels that look wrong at first sight, each with a MODE that makes the fault real."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout, allocate_tensor_memory
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

N: gl.constexpr = gl.constexpr(64)
FLAT: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
TILE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def places(layout: gl.constexpr):
    rows = gl.arange(0, N, gl.SliceLayout(1, layout))[:, None]
    return rows, rows * N + gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def index_kernel(out, n, MODE: gl.constexpr):
    """A ring that waits for the barrier before this one, which the first turn does not have."""
    bars = mbarrier.allocate_mbarrier(batch=4)
    tiles = gl.allocate_shared_memory(gl.float32, [4, N, N], FLAT)
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=1)
    total = gl.zeros([N, N], gl.float32, TILE)
    for i in range(n):
        tiles.index(i).store(gl.full([N, N], 1.0, gl.float32, TILE))
        mbarrier.arrive(bars.index(i), count=1)
        before = bars.index(i - 1)
        mbarrier.wait(before, 0, pred=i >= (0 if MODE == "waits" else 1))
        view = tiles.index(i - 1)
        if i > 0 or MODE == "loads":
            total += view.load(TILE)
    gl.store(out + places(TILE)[1], total)


@gluon.jit
def unwritten_kernel(out, n, MODE: gl.constexpr):
    """The first 48 rows of a tile are written; the others are loaded, and must go nowhere."""
    upper: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [N, N], FLAT)
    for i in gl.static_range(3):
        tile.slice(16 * i, 16).store(gl.full([16, N], 1.0, gl.float32, upper))
    rows, at = places(TILE)
    value = tile.load(TILE) * 2.0
    if MODE == "selected":
        gl.store(out + at, gl.where(rows < n, value, 3.0))
    elif MODE == "masked":
        gl.store(out + at, value, mask=rows < n)
    elif MODE == "reduced":
        sums = gl.sum(gl.reshape(value, [N, N]), 1)
        row = gl.arange(0, N, gl.SliceLayout(1, TILE))
        gl.store(out + row, sums, mask=row < n)
    elif MODE == "moved":
        other = gl.allocate_shared_memory(gl.float32, [N, N], FLAT)
        other.store(value)
        gl.store(out + at, other.load(TILE), mask=rows < n)
    elif MODE == "branch":
        total = gl.sum(gl.sum(value, 1), 0)
        if total > 0:
            gl.store(out + at, gl.full([N, N], 1.0, gl.float32, TILE))


@gluon.jit
def clipped_kernel(out_desc, n, MODE: gl.constexpr):
    """A TMA store drops the rows beyond the tensor's end, so they need no write."""
    tile = gl.allocate_shared_memory(gl.float32, [N, N], out_desc.layout)
    for i in gl.static_range(3):
        tile.slice(16 * i, 16).store(gl.full([16, N], 1.0, gl.float32, TILE))
    fence_async_shared()
    tma.async_store(out_desc, [0, 0], tile)
    tma.store_wait(0)


@gluon.jit
def tensor_memory_kernel(out, n, MODE: gl.constexpr):
    """O is scaled before its first product is there, and its value is then replaced."""
    layout: gl.constexpr = TensorMemoryLayout([128, N], 1)
    o = allocate_tensor_memory(gl.float32, [128, N], layout)
    registers: gl.constexpr = o.get_reg_layout()
    o.store(o.load(registers) * 0.5)
    if MODE != "kept":
        o.store(gl.full([128, N], 1.0, gl.float32, registers))
    rows = gl.arange(0, 128, gl.SliceLayout(1, registers))[:, None]
    cols = gl.arange(0, N, gl.SliceLayout(0, registers))[None, :]
    gl.store(out + rows * N + cols, o.load(registers))
