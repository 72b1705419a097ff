"""The public names of `import warpattn as wa`; `warpattn/__init__.py` imports this module when one is first used."""

from warpattn.api import attention, attention_paged, attention_varlen
from warpattn.errors import AttentionError
from warpattn.language.expr import Table, exp, load, log, maximum, minimum, tanh, to_float, to_int, where
from warpattn.masks import (
    Causal,
    Chunked,
    CustomMask,
    Document,
    Full,
    Lengths,
    Mask,
    Materialized,
    Padding,
    Prefix,
    SlidingWindow,
    Span,
)
from warpattn.problem.backends import Backend
from warpattn.quantized import Hadamard, Quantized
from warpattn.runtime.merging.states import merge_states
from warpattn.scores import ALiBi, Bias, CustomScore, Score, SoftCap
from warpattn.sequences import Dense, PagedKV, Ragged
from warpattn.sequences.latent import LatentPages
from warpattn.sequences.latent_query import LatentQuery
from warpattn.serving import DecodePlan, PrefillPlan, StepPlan
from warpattn.serving.append import append_paged
from warpattn.serving.call_shape import CallShape
from warpattn.serving.layers import EightBitCache, LargestStep, Layer
from warpattn.serving.quantizing import quantize
from warpattn.serving.slots import append_slots
from warpattn.serving.tuning import Tuned, tune
from warpattn.serving.warming import warm

__all__ = [
    "ALiBi",
    "AttentionError",
    "Backend",
    "Bias",
    "CallShape",
    "Causal",
    "Chunked",
    "CustomMask",
    "CustomScore",
    "DecodePlan",
    "Dense",
    "Document",
    "EightBitCache",
    "Full",
    "Hadamard",
    "LargestStep",
    "LatentPages",
    "LatentQuery",
    "Layer",
    "Lengths",
    "Mask",
    "Materialized",
    "Padding",
    "PagedKV",
    "PrefillPlan",
    "Prefix",
    "Quantized",
    "Ragged",
    "Score",
    "SlidingWindow",
    "SoftCap",
    "Span",
    "StepPlan",
    "Table",
    "Tuned",
    "append_paged",
    "append_slots",
    "attention",
    "attention_paged",
    "attention_varlen",
    "exp",
    "load",
    "log",
    "maximum",
    "merge_states",
    "minimum",
    "quantize",
    "tanh",
    "to_float",
    "to_int",
    "tune",
    "warm",
    "where",
]
