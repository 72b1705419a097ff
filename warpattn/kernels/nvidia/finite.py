"""Tests tiles in shared memory for NaN and infinities, and replaces these.

The test looks at 32 bits at a time: if all bits of an exponent are set, adding its lowest bit carries into the sign.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

TURN_BYTES = 16 * 128  # bytes of a tile that four warps access at once


@gluon.constexpr_function
def run_layout(columns, run):
    """Registers of a tile's rows in a warpgroup, `run` contiguous elements a thread."""
    lanes = min(columns // run, 32)
    return gl.BlockedLayout([1, run], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def exponents(dtype):
    """Masks for the numbers in 32 bits: (exponent bits, lowest exponent bits, sign bits)."""
    highest, lowest = {
        "fp32": (0x7F800000, 0x800000), "bf16": (0x7F80, 0x80), "fp16": (0x7C00, 0x400), "fp8e4nv": (0x7F, 1),
        "fp8e5": (0x7C, 4),
    }[str(dtype)]  # fmt: skip
    bits = dtype.primitive_bitwidth
    each = sum(1 << at for at in range(0, 32, bits))
    sign = (1 << (bits - 1)) * each
    return highest * each, lowest * each, sign - (1 << 32)


@gluon.jit
def any_nonfinite(tile):
    """Whether a value of a tile [N, columns] is NaN or infinite."""
    dtype: gl.constexpr = tile.dtype
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1] * dtype.primitive_bitwidth // 32
    words = tile.reinterpret(gl.int32, [rows, columns], gl.NVMMASharedLayout.get_default_for([rows, columns], gl.int32))
    layout: gl.constexpr = run_layout(columns, 4)
    bits: gl.constexpr = exponents(dtype)
    found = gl.zeros([16, columns], gl.int32, layout)
    for first in gl.static_range(0, rows, 16):
        found |= (words.slice(first, 16, 0).load(layout) & bits[0]) + bits[1]
    return gl.max(gl.max(((found & bits[2]) != 0).to(gl.int32), 1), 0) != 0


@gluon.jit
def clear_nonfinite(tile):
    """Replaces NaN and infinities in a 16-bit tile [N, columns] by 0; called by four warps."""
    replace_nonfinite(tile, 0)


@gluon.jit
def bound_nonfinite(tile):
    """Replaces NaN and infinities in a 16-bit tile [N, columns] by the largest number, so that scores of -inf still
    have weight 0; called by four warps."""
    bits: gl.constexpr = exponents(tile.dtype)
    replace_nonfinite(tile, bits[0] - 0x10001)


@gluon.jit
def replace_nonfinite(tile, magnitudes: gl.constexpr):
    """Replaces what is not finite in a 16-bit tile by two `magnitudes`, in 32 bits."""
    threads = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm(replace_asm(tile.shape[0] * tile.shape[1], tile.dtype, magnitudes), "r,r", [tile, threads])
    fence_async_shared()
    gl.barrier()


@gluon.constexpr_function
def replace_asm(count, dtype, magnitudes):
    """`replace_nonfinite` of `count` numbers: each thread looks at its own, four pieces of 16 bytes a turn, for 0 times
    what is not finite is NaN, and writes those of a turn that has any.

    Loops of Gluon kept addresses and layouts in registers beside the loops over query tiles. With the number of the
    thread from %tid the assembler spilled up to nine numbers more, one of them in a loop.
    """
    highest, lowest, signs = exponents(dtype)
    turns = 2 * count // TURN_BYTES
    pieces = min(turns, 4)
    words = [[f"x{4 * i + j}" for j in range(4)] for i in range(pieces)]
    every = [x for piece in words for x in piece]
    pair = {"bf16": "bf16x2", "fp16": "f16x2"}[str(dtype)]
    look = "".join(f"fma.rn.{pair} seen, {x}, zero, seen; " for x in every)
    replace = "".join(
        f"and.b32 m, {x}, {highest}; add.u32 m, m, {lowest}; prmt.b32 m, m, m, 0xBB99; and.b32 m, m, {~signs}; "
        f"lop3.b32 {x}, {x}, {magnitudes}, m, 0xD8; "
        for x in every
    )
    load, store = (
        "".join(form.format(at=TURN_BYTES * i, words=", ".join(piece)) for i, piece in enumerate(words))
        for form in ("ld.shared.v4.b32 {{{words}}}, [at + {at}]; ", "st.shared.v4.b32 [at + {at}], {{{words}}}; ")
    )
    return (
        f"{{ .reg .pred p; .reg .b32 at, end, zero, seen, m, x<{len(every)}>; mov.b32 zero, 0; "
        f"mad.lo.u32 at, $1, 16, $0; add.u32 end, $0, {turns * TURN_BYTES}; "
        f"AGAIN: mov.b32 seen, 0; {load}{look}and.b32 seen, seen, {~signs}; setp.eq.b32 p, seen, 0; @p bra NEXT; "
        f"{replace}{store}NEXT: add.u32 at, at, {pieces * TURN_BYTES}; setp.lt.u32 p, at, end; @p bra AGAIN; }}"
    )
