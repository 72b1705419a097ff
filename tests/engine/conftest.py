"""SGLang's classes for the tests around them, and what its arguments say there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest

DRAFTING = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


class Images(ModuleType):
    """A module with whatever is taken from it."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> MagicMock:
        return MagicMock()


@pytest.fixture(scope="module")
def sglang():
    """What the tests take from it, after our plug-in's registration."""
    pytest.importorskip("sglang")
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        sys.modules["torchvision" + name] = Images("torchvision" + name)
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    from warpattn.integrations.sglang import scope
    from warpattn.integrations.sglang_plugin import register

    register()
    settings(scope)
    assert "warpattn" in ATTENTION_BACKEND_CHOICES
    return SimpleNamespace(
        backends=ATTENTION_BACKENDS, AttentionType=AttentionType, RadixAttention=RadixAttention,
        MHATokenToKVPool=MHATokenToKVPool, MLATokenToKVPool=MLATokenToKVPool, SWAKVPool=SWAKVPool,
        ReqToTokenPool=ReqToTokenPool, ForwardBatch=ForwardBatch, ForwardMode=ForwardMode,
    )  # fmt: skip


def settings(scope, **changed) -> None:
    """What SGLang's arguments say, but for these."""
    values = SimpleNamespace(
        **{
            "speculative_algorithm": None, "speculative_eagle_topk": None, "speculative_num_draft_tokens": None,
            "attn_cp_size": 1, "attn_dcp_size": 1, "dllm": SimpleNamespace(dllm_algorithm=None),
        } | changed
    )  # fmt: skip
    scope.get_spec = scope.get_parallel = scope.get_exec = lambda: values


@pytest.fixture
def drafting(sglang):
    """SGLang's arguments with drafts."""
    from warpattn.integrations.sglang import scope

    settings(scope, **DRAFTING)
    yield
    settings(scope)
