"""Where a strip of K or V is in its tile, how it is loaded, and its layouts in registers and LDS."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def by_base(config, page_size):
    """Whether a strip is loaded from one base address: its rows are at equal distances, dense or in one page.

    Not for DMA from pages: after a copy to LDS, LLVM does not know that the table is unchanged, so it reads the page
    number into a vector register, and each buffer load becomes a loop over possible bases (gfx950).
    """
    return page_size == 0 or (config.kind == "registers" and page_size % config.btile[0] == 0)


@gluon.constexpr_function
def first_row(config, strip):
    """First key of a strip in its tile."""
    return config.start(strip, 0)


@gluon.constexpr_function
def first_col(config, strip):
    """First column of a strip in its tile."""
    return config.start(strip, 1)


@gluon.constexpr_function
def copy_layout(config):
    """Which elements of a strip each lane loads: lanes side by side in rows, waves below each other."""
    return gl.BlockedLayout(list(config.lane_tile), list(config.lanes), [config.waves, 1], [1, 0])


@gluon.constexpr_function
def shared_layout(config):
    """A strip in LDS."""
    vector, per_phase, phases = config.swizzle
    return gl.SwizzledSharedLayout(vector, per_phase, phases, [0, 1] if config.transposed else [1, 0])
