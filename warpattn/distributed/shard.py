"""Cuts tensors into the shards of ranks, and joins them again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from warpattn.distributed.agreement import agree, described
from warpattn.distributed.placement import PLACEMENTS, Placement
from warpattn.distributed.ranks import Ranks, ranks_of, ranks_of_mesh
from warpattn.errors import AttentionError, Rules, many
from warpattn.inputs import is_tensor, kind_of
from warpattn.torch_modes import without_autocast

INNER = "contiguous"  # placement on the second dimension of a mesh


def shard(x: Tensor, dim: int, group: Any = None, placement: str = "zigzag") -> Tensor:
    """Return this rank's part of a tensor that every rank has whole, as a copy through which gradients flow.

    x: any tensor whose size in `dim` is a multiple of the ranks, with "zigzag" of twice the ranks. group: None (all
    processes), a ProcessGroup or a DeviceMesh, of two dimensions for `mesh_attention`. Cut positions, labels and other
    tensors with a row per token in the same way. Raises AttentionError.
    """
    dim = _checked(x, dim, placement)
    for ranks, name in _cuts(group, placement):
        x = Placement(name, ranks.size).cut(x, dim, ranks.rank)
    return x


def unshard(x: Tensor, dim: int, group: Any = None, placement: str = "zigzag") -> Tensor:
    """Join the parts that `shard` made to the whole tensor, on every rank; a collective.

    All ranks pass equal shapes. The gradient of a part is the sum of the gradients on all ranks. Raises
    AttentionError, on every rank, for arguments that break a rule or differ between ranks.
    """
    cuts = _cuts(group, placement)
    told = described("unshard", {"x": x, "dim": dim, "placement": placement, "gradients": torch.is_grad_enabled()})
    agree([ranks for ranks, _ in cuts], told, lambda: _checked(x, dim, placement))
    dim = dim % x.ndim
    for ranks, name in reversed(cuts):
        x = _Gather.apply(x, dim, ranks, Placement(name, ranks.size))
    return x


def _checked(x: Any, dim: int, placement: str) -> int:
    rules = Rules()
    known = isinstance(placement, str) and placement in PLACEMENTS
    rules.require(is_tensor(x), f"x is {kind_of(x)}", "it must be a torch.Tensor in memory")
    rules.require(known, f"placement is {kind_of(placement)}", f"it must be one of {', '.join(PLACEMENTS)}")
    rules.done()
    if type(dim) is not int or not -x.ndim <= dim < x.ndim:
        raise AttentionError(f"dim is {kind_of(dim)}; x has {many(x.ndim, 'dimension')}")
    return dim % x.ndim


def _cuts(group: Any, placement: str) -> list[tuple[Ranks, str]]:
    """Return the groups that cut a tensor one after the other, each with its placement."""
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        ring, heads = ranks_of_mesh(group)
        return [(ring, placement), (heads, INNER)]
    return [(ranks_of(group), placement)]


class _Gather(torch.autograd.Function):
    """Gathers the parts of all ranks in the order of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks, placement: Placement) -> Tensor:
        ctx.given = dim, ranks, placement
        sent = x.contiguous()
        if x.is_floating_point() and x.itemsize == 1:
            sent = sent.view(torch.uint8)  # gloo has no 8-bit floats
        parts = [torch.empty_like(sent) for _ in range(ranks.size)]
        dist.all_gather(parts, sent, group=ranks.group)
        with without_autocast(x.device):
            return placement.join(torch.cat(parts, dim), dim).view(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Reduce.apply(*gradients, *ctx.given), None, None, None


class _Reduce(torch.autograd.Function):
    """Sums tensors of all ranks and cuts this rank's part, so that each of the two has the other as its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks, placement: Placement) -> Tensor:
        ctx.given = dim, ranks, placement
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ranks.group)
        return placement.cut(total, dim, ranks.rank)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Gather.apply(*gradients, *ctx.given), None, None, None
