"""Kernels compiled once for all tests that look at machine code."""

from functools import cache

from warpattn.kernels.sm90.prefill.config import SM90Config
from warpattn.language.nodes import Program
from warpattn.masks import Causal


@cache
def compiled(config: SM90Config):
    """The prefill kernel of a config with a causal mask and an LSE, for sm_90."""
    from warpattn.kernels.sm90.prefill.signature import compile_prefill

    mask = Causal().program()
    return compile_prefill(config, Program((mask.keep, *mask.span), mask.tensors), None, False, True)
