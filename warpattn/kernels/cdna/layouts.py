"""Register layouts of the CDNA kernels, derived from a config."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def product_layout(config):
    """Registers of S and O: a lane holds four columns of a row side by side, so that P needs no move between lanes to
    become an operand."""
    version = 4 if config.arch == "gfx950" else 3
    depth = (8 if config.instr == 32 else 16) * (version - 2)
    return gl.amd.AMDMFMALayout(version, [config.instr, config.instr, depth], True, [config.waves_m, config.waves_n])


@gluon.constexpr_function
def scores_operand(config, index):
    """Operands of Q·Kᵀ: 16 bytes of the head dim in a lane."""
    return gl.DotOperandLayout(index, product_layout(config), 8)


@gluon.constexpr_function
def output_operand(config, index):
    """Operands of P·V: four keys in a lane, as the scores have them."""
    return gl.DotOperandLayout(index, product_layout(config), 4)
