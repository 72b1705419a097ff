"""The assembly of a group of wgmma that a kernel writes itself: O += P·V, P in registers and V in boxes of columns."""

from __future__ import annotations

from .valuetypes import Type

SWIZZLED = 128  # bytes of a box's row
_STEP = "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{o}}}, {{{p}}}, v, p, 1, 1, 1;"


def product_group(columns: int, box: Type) -> str:
    """Return the text that has this meaning, for an accumulator of `columns` and boxes of type `box`. No other one is
    simulated: another order of registers or another descriptor of V would give other values on a card."""
    keys, width = box.shape or (0, 0)
    row, registers = min(width * box.itemsize, SWIZZLED), columns // 2
    o = ", ".join(f"${i}" for i in range(registers))
    steps = []
    for first in range(2 * registers, 2 * registers + keys // 4, 4):
        p = ", ".join(f"${first + i}" for i in range(4))
        steps.append(_STEP.format(columns=columns, kind=box.elem, o=o, p=p))
    descriptor = 1 << 62 | (8 * row >> 4) << 32 | (keys * row >> 4) << 16
    return (
        "{ .reg .pred p; .reg .b32 a; .reg .b64 v; setp.ne.b32 p, 1, 0; "
        f"bfe.u32 a, ${2 * registers + keys // 4}, 4, 14; cvt.u64.u32 v, a; or.b64 v, v, {descriptor}; "
        f"wgmma.fence.sync.aligned; {f' add.s64 v, v, {16 * row >> 4}; '.join(steps)} "
        "wgmma.commit_group.sync.aligned; }"
    )
