"""Scales of 8-bit queries, keys and values inside a kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LEAST_SCALE = gl.constexpr(2.0**-100)  # of scores: a smaller product of two scales makes exponents of 0 times infinity


@gluon.constexpr_function
def by_token(config):
    """Whether tokens have scales of their own."""
    return config.eight_bit is not None and config.eight_bit.by_token


@gluon.constexpr_function
def has_scale(config, i, *kinds):
    """Whether keys (0), values (1) or queries (2) have a scale of one of these kinds."""
    return config.eight_bit is not None and config.eight_bit.scales[i] in kinds
