"""SGLang's attention without what else it imports: stand-ins for its servers, its compiled kernels, and images.

Its compiled kernels are built for another torch than a card may have; its Triton backend needs one fact of theirs. A
stand-in is used where the package is not installed, for the list below and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from importlib.abc import Loader
from types import ModuleType, SimpleNamespace
from typing import Any

import transformers

ABSENT = ("IPython", "aiohttp", "einops", "gguf", "orjson", "partial_json_parser", "psutil", "pybase64",
          "sentencepiece", "sgl_kernel", "starlette", "torchvision", "traitlets", "zmq")  # fmt: skip
# Its servers, and the registering of image processors, which transformers 5.17 refuses without torchvision.
OWN_ABSENT = ("sglang.srt.entrypoints", "sglang.srt.configs.utils")


class _Named(type):
    """A class with whatever is taken from it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (Anything,), {})


class Anything(metaclass=_Named):
    """Can be made, called, inherited and used as a decorator."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __init_subclass__(cls, **named: Any) -> None:
        pass

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class StandIn(ModuleType):
    """A module with whatever is taken from it."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (Anything,), {})


class Finder(Loader):
    """Finds stand-ins for modules of these names."""

    def __init__(self, *prefixes: str) -> None:
        self.prefixes = prefixes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = any(name == prefix or name.startswith(prefix + ".") for prefix in self.prefixes)
        return importlib.machinery.ModuleSpec(name, self) if known else None

    def create_module(self, spec: Any) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""


def attention_classes() -> SimpleNamespace:
    """What `sglang_backends` takes from SGLang, by name; ImportError where it is not installed."""
    assert transformers.__version__  # imported before the stand-ins, which it would take for the real ones
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(*OWN_ABSENT))
        sys.meta_path.append(Finder(*ABSENT))
    arch = importlib.import_module("sglang.kernels.jit.utils.arch")
    kernels = importlib.import_module("sgl_kernel.utils")
    if isinstance(kernels, StandIn):
        vars(kernels)["is_arch_support_pdl"] = arch.is_arch_support_pdl
    wanted = {
        "sglang.srt.layers.attention.attention_registry": ("ATTENTION_BACKENDS",),
        "sglang.srt.layers.radix_attention": ("RadixAttention",),
        "sglang.srt.mem_cache.memory_pool": ("MHATokenToKVPool", "ReqToTokenPool"),
        "sglang.srt.mem_cache.kv_index_translator": ("KVIndexTranslator",),
        "sglang.srt.model_executor.forward_batch_info": ("ForwardBatch", "ForwardMode"),
        "sglang.srt.model_executor.runner_utils.capture_mode": ("model_capture_mode",),
        "sglang.srt.configs.model_config": ("AttentionArch",),
    }
    found = {name: getattr(importlib.import_module(module), name) for module, names in wanted.items() for name in names}
    return SimpleNamespace(**found, triton=importlib.import_module("sglang.srt.layers.attention.triton_backend"))
