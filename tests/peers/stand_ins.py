"""What flash-attn's suites import beside the functions of the drop-ins: rotary embedding, helpers, private names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import warpattn as wa
from warpattn import AttentionError
from warpattn.api.backward import attention_backward
from warpattn.integrations import flash_attn


class Private:
    """A private function or module of flash-attn: it can be imported, and says what it is when it is called."""

    compile_cache = None

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AttentionError(f"{self.name} is a private function of flash-attn; the drop-ins have the public ones")

    def __getattr__(self, name: str) -> Private:
        return Private(f"{self.name}.{name}")


def private(name: str) -> Any:
    """What a drop-in's module answers for a name that it lacks."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Private(name)


def install(version: int, folder: Path) -> None:
    """Put the drop-ins of a version, and what its suite imports beside them, into sys.modules."""
    for each in sorted({2, version}):
        flash_attn.install(each)
    for name in [name for each in {2, version} for name in flash_attn.MODULES[each]]:
        sys.modules[name].__dict__.setdefault("__getattr__", private)
    add("flash_attn.layers")
    add("flash_attn.layers.rotary", apply_rotary_emb=apply_rotary_emb)
    sys.modules["flash_attn.flash_attn_interface"].__dict__["USE_TRITON_ROCM"] = False
    if version == 4:
        sys.modules["flash_attn.cute.interface"].__dict__["_flash_attn_bwd"] = flash_attn_bwd
        add("flash_attn.cute.cache_utils", JITCache=SimpleNamespace)
        spec = importlib.util.spec_from_file_location("flash_attn.cute.testing", folder / "cute_testing.py")
        assert spec is not None and spec.loader is not None
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])


def add(name: str, **content: Any) -> None:
    """A module of its own under a name."""
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(content, __path__=[])
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, module)


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """x (batch, seq, heads, dim) turned by the angles of its positions, in fp32."""
    first = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
    position = (first + torch.arange(x.shape[1], device=x.device)).expand(len(x), -1).long()
    position = position.clamp(max=len(cos) - 1)  # rows of padding
    c, s = (table[position].float()[:, :, None] for table in (cos, sin))
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width].float(), x[..., width:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (a * c - b * s, a * s + b * c)
    joined = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([joined.to(x.dtype), rest], dim=-1)


def flash_attn_bwd(
    *given: Tensor,
    causal: bool = False,
    deterministic: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The private backward, which a suite repeats to see whether its bits change; on Hopper without windows.

    given: q, k, v, out, dout and lse.
    """
    q, k, v, out, dout, lse = given
    seq = None if cu_seqlens_q is None else wa.Ragged(cu_seqlens_q, cu_seqlens_k)
    backend, mask = wa.Backend(deterministic=deterministic), wa.Causal() if causal else None
    return attention_backward(dout, q, k, v, out, lse, seq=seq, mask=mask, backend=backend)


def pretend_a_card() -> None:
    """Let torch answer the suites' questions about a card as a Hopper would."""
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=80 * 2**30, multi_processor_count=132)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
