"""Attention within DistributedDataParallel and FSDP2 on gloo: gradients are those of the whole batch in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import warpattn as wa
from tests.unit.distributed.world import failures

RANKS, ROWS, HEADS, DIM = 2, 9, 2, 8


class Block(torch.nn.Module):
    """Causal attention with learnt slopes behind one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.slopes = torch.nn.Parameter(torch.rand(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        return wa.attention(q, k, v, mask=wa.Causal(), score=wa.ALiBi(self.slopes))


def gradients(block: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    block(x).square().mean().backward()
    found = {name.removeprefix("module."): p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def in_parallel() -> None:
    same_as_the_whole_batch(DistributedDataParallel)


def sharded() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    same_as_the_whole_batch(lambda block: fully_shard(block, mesh=mesh))


def same_as_the_whole_batch(wrapped: Callable[[Block], torch.nn.Module]) -> None:
    block, whole = Block(), Block()
    whole.load_state_dict(block.state_dict())
    x = torch.randn(2 * RANKS, ROWS, HEADS * DIM)
    found = gradients(wrapped(block), x.chunk(RANKS)[dist.get_rank()])
    expected = gradients(whole, x)
    assert set(found) == set(expected) == {"qkv.weight", "qkv.bias", "slopes"}
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(found[name], gradient, msg=name)


def test_gradients_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    assert failures([in_parallel, sharded], tmp_path, RANKS) == []
