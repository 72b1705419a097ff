"""What ranks do in tests of torch's own context parallelism and of DTensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

import warpattn as wa
from tests.unit.distributed.jobs import FLOAT
from warpattn.integrations import torch_sdpa


def context(causal: bool) -> None:
    """torch's ring over our operators, forward and backward, as it runs on a card; on the CPU by the same operator."""
    mesh = init_device_mesh("cpu", (4,))
    q, k, v, dout = (torch.randn(2, 4, 32, 8, dtype=FLOAT) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = wa.attention(*(x.transpose(1, 2) for x in leaves), mask=wa.Causal() if causal else None).transpose(1, 2)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    torch_sdpa.register()
    activate_flash_attention_impl("warpattn")
    buffers = [x.clone() for x in (q, k, v, dout, *wanted)]
    rows = [2] * len(buffers)
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=rows, no_restore_buffers=set(buffers)):
        given = [DTensor.from_local(x.detach(), mesh, [Shard(2)], run_check=False) for x in buffers[:4]]
        parts = [x.requires_grad_() for x in given]
        out = torch.ops.aten._scaled_dot_product_flash_attention(*parts[:3], 0.0, causal)[0]
        found = [out.detach(), *torch.autograd.grad(out, parts[:3], parts[3].detach())]
        for mine, right in zip(found, buffers[4:], strict=True):
            torch.testing.assert_close(mine.to_local(), right, rtol=1e-5, atol=1e-5)  # torch merges in fp32
    restore_flash_attention_impl()


def sharded() -> None:
    """DTensors along the sequence, on a mesh that also shards the batch, or heads, or nothing."""
    mesh = init_device_mesh("cpu", (2, 2))
    given = [torch.randn(2, 16, heads, 8, dtype=FLOAT) for heads in (4, 2, 2)]
    out = wa.attention(*(leaves := [x.clone().requires_grad_() for x in given]), mask=wa.SlidingWindow(5))
    wanted = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    for other in (Replicate(), Shard(0), Shard(2)):
        parts = [distribute_tensor(x, mesh, [other, Shard(1)]).requires_grad_() for x in given]
        out, lse = wa.attention(*parts, mask=wa.SlidingWindow(5), return_lse=True)
        assert lse.shape == (2, 4, 16)
        found = [out.detach(), *torch.autograd.grad(out.square().sum(), parts)]
        for mine, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine.full_tensor(), right, rtol=1e-11, atol=1e-12)


def refused() -> None:
    """What cannot be attended to in a ring is one sentence."""
    mesh = init_device_mesh("cpu", (4,))
    q, k, v = (distribute_tensor(torch.randn(4, 16, 4, 8), mesh, [Shard(1)]) for _ in range(3))
    for tensors, tail, reason in (
        ((q, k.to_local(), v), {}, r"k is a torch.float32 tensor of shape .*; it must be a DTensor placed as q is"),
        ((x.redistribute(placements=[Replicate()]) for x in (q, k, v)), {}, "must shard the sequence"),
        ((q, k, v), {"out": torch.empty(4, 4, 4, 8)}, "out is given; with DTensors it must be None"),
        ([distribute_tensor(torch.randn(4, 18, 4, 8), mesh, [Shard(1)])] * 3, {}, "q has 18 elements in dimension 1"),
    ):
        with pytest.raises(wa.AttentionError, match=reason):
            wa.attention(*tensors, **tail)
    with pytest.raises(wa.AttentionError, match=r"must be a plain torch\.Tensor"):
        wa.attention_varlen(q, k, v, wa.Ragged(torch.tensor([0, 4], dtype=torch.int32)))


def jobs() -> list[Any]:
    """All of it."""
    return [partial(context, True), sharded, refused]
