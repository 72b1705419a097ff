"""Kernels compiled once for all tests that look at machine code."""

from functools import cache

from warpattn.kernels.sm90.prefill.config import SM90Config
from warpattn.language.nodes import Program
from warpattn.masks import Causal
from warpattn.problem.arch import compile_options, triton_target


@cache
def compiled(config: SM90Config):
    """The prefill kernel of a config with a causal mask and an LSE, for sm_90."""
    import triton

    from warpattn.kernels.sm90.prefill.signature import prefill_source

    mask = Causal().program()
    source = prefill_source(config, Program((mask.keep, *mask.span), mask.tensors), None, False, True)
    return triton.compile(source, target=triton_target("sm90"), options=compile_options())
