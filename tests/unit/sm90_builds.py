"""Kernels compiled once for all tests that look at machine code."""

from functools import cache

from warpattn.kernels.sm90.config import SM90Config
from warpattn.masks import Causal
from warpattn.nodes import Program


@cache
def compiled(config: SM90Config):
    """The prefill kernel of a config with a causal mask and an LSE, for sm_90."""
    from warpattn.kernels.sm90.build import compile_prefill

    mask = Causal().program()
    return compile_prefill(config, Program((mask.keep, *mask.span), mask.tensors), None, False, True)
