"""Who takes part in `bench.decode`: warpattn and variants of it, others that can be installed, and the bare reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.decode.cases import Inputs
from bench.decode.own import own_calls
from bench.peers.adapter import Call, Unsupported, cannot_import, no_gpu, version_of

OWN = "warpattn"
EVERY = (OWN, "read", "cudnn", "flashinfer", "flashinfer-tc", "fa4")
FLASHINFER_WORKSPACE = 256 << 20


def cudnn_call(x: Inputs) -> Call:
    """torch's SDPA with cuDNN, on equal lengths in one piece."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if x.table is not None or not x.case.even or x.case.tokens > 1 or x.case.dim_v:
        raise Unsupported("torch's SDPA takes one token and dense keys of one length")
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=x.case.heads_q > x.case.heads_kv)
        return out.transpose(1, 2)

    return call


def flashinfer_calls(layers: Sequence[Inputs], tensor_cores: bool) -> list[Call]:
    """FlashInfer's batch decode through pages, planned once for all layers."""
    import flashinfer

    x = layers[0]
    case = x.case
    if x.table is None or case.tokens > 1:
        raise Unsupported("its batch decode takes one token and pages")
    if case.dim_v:
        return flashinfer_latent_calls(layers, x.table, "fa3" if tensor_cores else "fa2")
    counts = [-(-length // case.page) for length in case.lengths]
    host = torch.tensor([0, *counts], dtype=torch.int32)
    pages = torch.cat([x.table[b, :count] for b, count in enumerate(counts)])
    last = torch.tensor([(length - 1) % case.page + 1 for length in case.lengths], dtype=torch.int32)
    buffer = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=x.q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(
        host.cumsum(0).to(torch.int32).to(x.q.device), pages, last.to(x.q.device), case.heads_q, case.heads_kv,
        case.dim, case.page, q_data_type=x.q.dtype, kv_data_type=x.k.dtype,
    )  # fmt: skip
    return [lambda x=x: wrapper.run(x.q.flatten(0, 1), (x.k, x.v)).view_as(x.q) for x in layers]


def flashinfer_latent_calls(layers: Sequence[Inputs], table: Tensor, backend: str) -> list[Call]:
    """FlashInfer's latent attention, with latents and rotary parts in caches of their own as it wants them."""
    import flashinfer

    x = layers[0]
    case = x.case
    counts = [-(-length // case.page) for length in case.lengths]
    buffer = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=x.q.device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(buffer, backend=backend)
    queries = torch.arange(case.batch + 1, dtype=torch.int32, device=x.q.device)
    pages = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(x.q.device, torch.int32)
    used = torch.cat([table[b, :count] for b, count in enumerate(counts)])
    wrapper.plan(
        queries, pages, used, x.lengths, case.heads_q, case.dim_v, case.dim - case.dim_v, case.page, False,
        case.dim**-0.5, x.q.dtype, x.k.dtype,
    )  # fmt: skip

    def call(x: Inputs) -> Call:
        q, k = x.q.flatten(0, 1), x.k.flatten(2)
        parts = [part.contiguous() for y in (q, k) for part in (y[..., : case.dim_v], y[..., case.dim_v :])]
        return lambda: wrapper.run(*parts).unsqueeze(1)

    return [call(x) for x in layers]


def fa4_call(x: Inputs) -> Call:
    """flash-attn-4; it splits keys as it sees fit on Blackwell, and not at all on Hopper."""
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    if x.case.dim_v:
        raise Unsupported("its latent attention is for Blackwell")
    splits = 0 if torch.cuda.get_device_capability(x.q.device)[0] >= 10 else 1  # 0: it chooses
    if x.table is None:
        return lambda: flash_attn_func(x.q, x.k, x.v, num_splits=splits)[0]
    pages = {"seqused_k": x.lengths, "page_table": x.table, "max_seqlen_k": max(x.case.lengths)}
    return lambda: flash_attn_varlen_func(x.q, x.k, x.v, num_splits=splits, **pages)[0]


def read_call(x: Inputs) -> Call:
    """Only the reading: what no kernel that reads these keys can go below."""
    from bench.measure.read_kernel import TILE, read_step
    from warpattn.runtime.bound_launches import BoundLaunches

    if x.table is not None or not x.case.even or x.case.lengths[0] % TILE or x.case.dtype != "bfloat16":
        raise Unsupported(f"it reads dense bfloat16 keys of one length, a multiple of {TILE}")
    bound = BoundLaunches((read_step(x.k, x.v),), x.q.get_device())

    def call() -> Tensor:
        bound.launch()
        return x.q

    return call


@dataclass(frozen=True)
class Peer:
    """A name, how to make calls of the layers, why it cannot run here (or None), its version, whether it attends."""

    name: str
    prepare: Callable[[Sequence[Inputs]], list[Call]]
    reason: str | None
    version: str
    attends: bool = True


def each(prepare: Callable[[Inputs], Call]) -> Callable[[Sequence[Inputs]], list[Call]]:
    """For peers that plan nothing ahead: every layer by itself."""
    return lambda layers: [prepare(x) for x in layers]


def peers(names: Sequence[str], variants: Sequence[str]) -> list[Peer]:
    """The peers of these names, and warpattn's variants."""
    own = version_of("warpattn", "triton")
    infer, infer_version = no_gpu() or cannot_import("flashinfer"), version_of("flashinfer-python")
    flash = no_gpu() or cannot_import("flash_attn.cute.interface")
    known = {
        "read": Peer("read", each(read_call), no_gpu(), own, attends=False),
        OWN: Peer(OWN, partial(own_calls, fields={}), None, own),
        "cudnn": Peer("cudnn", each(cudnn_call), no_gpu(), f"cuDNN {torch.backends.cudnn.version()}"),
        "flashinfer": Peer("flashinfer", partial(flashinfer_calls, tensor_cores=False), infer, infer_version),
        "flashinfer-tc": Peer("flashinfer-tc", partial(flashinfer_calls, tensor_cores=True), infer, infer_version),
        "fa4": Peer("fa4", each(fa4_call), flash, version_of("flash-attn-4", "nvidia-cutlass-dsl")),
    }
    found = [known[name] for name in names]
    for text in variants:
        fields = {key: int(value) for key, value in (part.split("=") for part in text.split(","))}
        found.append(Peer(f"{OWN}:{text}", partial(own_calls, fields=fields), no_gpu(), own))
    return found
