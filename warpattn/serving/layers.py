"""Reads a model's attention layers from its transformers config, as far as they decide which kernels run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from warpattn.errors import AttentionError, Rules
from warpattn.inputs import kind_of, number, of_type
from warpattn.language.traced import MAX_INT, whole
from warpattn.masks import Causal, Mask, SlidingWindow
from warpattn.quantized import EIGHT_BIT, GRANULARITIES
from warpattn.scores import Score, SoftCap

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}
JSON = (type(None), bool, int, float, str, list, tuple, torch.dtype)  # types that an entry in READ may have
PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
SCALES = ("attention_multiplier", "query_pre_attn_scalar")  # the scale; 1 / scale²
READ = ("dtype", "torch_dtype", "attn_logit_softcapping", "model_type", "layer_types", "use_sliding_window", *PATTERNS)
WITH_SINKS = ("gpt_oss",)  # model types whose layers have a sink for each head
UNSCALED = ("gemma3n_text", "gemma4_text", "gemma4_unified_text", "gpt_neo")  # model types whose scale is 1


@dataclass(frozen=True)
class EightBitCache:
    """The format of an 8-bit cache: `dtype`, one of `quantized.EIGHT_BIT`, and `per`, the granularity of its scales as
    in `quantize`, None for no scale. In a latent cache with one scale or none, rotary parts have 8 bits, too, as in
    engines. Raises AttentionError for other values, and for blocks of rows, which no cache has."""

    dtype: torch.dtype = torch.float8_e4m3fn
    per: str | int | None = "tensor"

    def __post_init__(self) -> None:
        rules = Rules()
        known = isinstance(self.dtype, torch.dtype) and self.dtype in EIGHT_BIT
        listed = ", ".join(str(x) for x in EIGHT_BIT)
        rules.require(known, f"dtype is {kind_of(self.dtype)}", f"dtype of a cache of 8 bits must be one of {listed}")
        known = self.per is None or (isinstance(self.per, str | int) and self.per in GRANULARITIES)
        listed = ", ".join(str(x) for x in GRANULARITIES)
        rules.require(known, f"per is {kind_of(self.per)}", f"per must be None or one of {listed}")
        rules.done()


@dataclass(frozen=True)
class Layer:
    """One kind of attention layer. window: keys that a query sees, its own included; None: all up to its own. cache:
    the format of an 8-bit cache; None: keys and values have `dtype`. scale: of scores; None: 1/sqrt(dim_qk)."""

    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    latent: int = 0  # columns of a latent cache that are values; 0: keys and values are separate
    cache: EightBitCache | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        rules = Rules()
        sizes = {"heads_q": 1, "heads_kv": 1, "dim_qk": 1, "dim_v": 1, "latent": 0}
        sizes |= {} if self.window is None else {"window": 1}
        fine = [_require_int(rules, name, getattr(self, name), least) for name, least in sizes.items()]
        rules.flag("sinks", self.sinks)
        known = isinstance(self.dtype, torch.dtype)
        rules.require(known, f"dtype is {kind_of(self.dtype)}", "it must be a torch.dtype")
        stored = self.cache is None or isinstance(self.cache, EightBitCache)
        rules.require(stored, f"cache is {kind_of(self.cache)}", "it must be an EightBitCache or None")
        scale = 0.0 if self.scale is None else number(self.scale)
        scaled = scale is not None and abs(scale) <= torch.finfo(torch.float32).max
        rules.require(scaled, f"scale is {kind_of(self.scale)}", "it must be a finite number of fp32 or None")
        if all(fine):
            heads = f"heads_q is {self.heads_q} and heads_kv {self.heads_kv}"
            rules.require(self.heads_q % self.heads_kv == 0, heads, "the first must be a multiple of the second")
        rules.done()
        _ = self.score  # a soft cap out of its range is refused

    @property
    def mask(self) -> Mask:
        return Causal() if self.window is None else SlidingWindow(self.window)

    @property
    def score(self) -> Score | None:
        return None if self.soft_cap is None else SoftCap(self.soft_cap)


@dataclass(frozen=True)
class LargestStep:
    """The largest step that will be served: requests, new tokens of all requests, tokens of one request with its
    context, keys of a page, and draft tokens of a request in speculative decoding."""

    requests: int = 256
    tokens: int = 8192
    length: int = 32768
    page_size: int = 16
    drafts: int = 0

    def __post_init__(self) -> None:
        rules = Rules()
        for name, least in (("requests", 1), ("tokens", 1), ("length", 1), ("page_size", 1), ("drafts", 0)):
            _require_int(rules, name, getattr(self, name), least)
        rules.done()


def check_step(largest: object, progress: object) -> None:
    """Raise AttentionError for arguments of `warm` and `tune` that are not what both take."""
    if largest is not None and not isinstance(largest, LargestStep):
        raise AttentionError(f"largest is {kind_of(largest)}; it must be a LargestStep or None")
    if not callable(progress):
        raise AttentionError(f"progress is {kind_of(progress)}; it must be a function of the part done")


def _require_int(rules: Rules, name: str, value: object, least: int) -> bool:
    fine = isinstance(value, int) and whole(value, least) is not None
    return rules.require(fine, f"{name} is {kind_of(value)}", f"{name} must be an integer from {least} to {MAX_INT}")


def read_config(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a transformers config from a folder with config.json, or from such a file."""
    file, rule = Path(path), "give a folder with config.json, or such a file"
    try:
        file = file / "config.json" if file.is_dir() else file
        if file.exists() and not file.is_file():
            raise AttentionError(f"config {str(file)!r} is no file; {rule}")
        config = json.loads(file.read_text())
    except AttentionError:
        raise
    except OSError as error:
        raise AttentionError(f"config {str(file)!r} cannot be read: {error.strerror}; {rule}") from None
    except (ValueError, RecursionError):
        raise AttentionError(f"{file} is no JSON; a transformers config.json is") from None
    if not isinstance(config, dict):
        raise AttentionError(f"{file} holds {of_type(config)}; a transformers config is a JSON object")
    return config


def layers_of(config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Return the kinds of layers in a transformers config, each once; AttentionError if a needed entry is missing."""
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, Mapping):
        raise AttentionError(f"text_config is {kind_of(inner)}; it must be an object of JSON")
    config = {**config, **({} if inner is None else inner)}
    for name in READ:
        if not isinstance(config.get(name), JSON):
            raise AttentionError(f"{name} is {kind_of(config[name])}; a transformers config holds what JSON has")
    heads = _number(config, "num_attention_heads", "n_head", "num_heads")
    if heads is None or heads < 1:
        rule = "a transformers config says num_attention_heads"
        raise AttentionError(f"the config of {config.get('model_type', 'the model')} has no number of heads; {rule}")
    dtype = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), torch.bfloat16)
    cap = config.get("attn_logit_softcapping") or None
    sinks = config.get("model_type") in WITH_SINKS
    rank = _number(config, "kv_lora_rank")
    if rank:
        return _latent_layers(config, heads, rank, dtype)
    hidden = _number(config, "hidden_size", "n_embd")
    dim = _number(config, "head_dim") or (None if hidden is None else hidden // heads)
    if dim is None:
        raise AttentionError("the config has neither head_dim nor hidden_size; one of them must say the head dim")
    heads_kv = _number(config, "num_key_value_heads") or heads
    plain = Layer(heads, heads_kv, dim, dim, dtype, None, cap, sinks, scale=_scale(config))
    return tuple(replace(plain, window=window) for window in dict.fromkeys(_windows(config)))


def with_cache(layers: Sequence[Layer], cache: EightBitCache) -> tuple[Layer, ...]:
    """Give layers without an 8-bit cache this one, except for prompts of latent attention: they do not read the cache,
    which holds latents."""
    latent = any(layer.latent for layer in layers)
    return tuple(
        replace(layer, cache=cache) if layer.cache is None and bool(layer.latent) == latent else layer
        for layer in layers
    )


def _latent_layers(config: Mapping[str, Any], heads: int, rank: int, dtype: torch.dtype) -> tuple[Layer, ...]:
    """Return the layers of latent attention: prompts with keys and values of all heads, decode over the latents."""
    rope, nope = _number(config, "qk_rope_head_dim") or 0, _number(config, "qk_nope_head_dim") or 0
    dim_v = _number(config, "v_head_dim") or nope
    prompts = Layer(heads, heads, nope + rope, dim_v, dtype)
    return (prompts, Layer(heads, 1, rank + rope, rank, dtype, latent=rank))


def _windows(config: Mapping[str, Any]) -> list[int | None]:
    """Return the window of each layer, None for layers without one."""
    window = _number(config, "sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return [None]
    kinds = config.get("layer_types")
    if kinds:
        if not isinstance(kinds, list | tuple):
            raise AttentionError(f"layer_types is {kind_of(kinds)}; it must be a list, of one word a layer")
        return [window if kind == "sliding_attention" else None for kind in kinds]
    alternates = any(config.get(name) for name in PATTERNS)
    return [window, None] if alternates or config.get("model_type") == "gemma2" else [window]


def _scale(config: Mapping[str, Any]) -> float | None:
    """Return the scale of scores; None for 1/sqrt(head dim)."""
    given, scalar = (config.get(name) for name in SCALES)
    for name, value in zip(SCALES, (given, scalar), strict=True):
        if value is not None and (number(value) is None or value <= 0):
            raise AttentionError(f"{name} is {kind_of(value)}; in a transformers config it must be a number above 0")
    if given is not None:
        return float(given)
    if scalar is not None:
        return scalar**-0.5
    return 1.0 if config.get("model_type") in UNSCALED else None


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these entries that is set, None without one; raises AttentionError if it is no int."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise AttentionError(f"{name} is {kind_of(value)}; in a transformers config it must be an int or null")
        return value
    return None
