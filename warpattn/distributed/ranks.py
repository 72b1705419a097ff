"""The ranks that share a sequence: a process group, a DeviceMesh of one dimension, or all processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from warpattn.errors import AttentionError, many
from warpattn.inputs import kind_of


class Ranks(NamedTuple):
    """A process group, with this process's rank in it."""

    group: dist.ProcessGroup
    rank: int
    size: int


def ranks_of(group: Any) -> Ranks:
    """Return the ranks of `group`; None means all processes. Raises AttentionError."""
    if not (dist.is_available() and dist.is_initialized()):
        rule = "call torch.distributed.init_process_group first, in every process that torchrun started"
        raise AttentionError(f"group is {kind_of(group)} and torch.distributed is not initialized; {rule}")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            rule = "it must have one dimension: mesh_attention takes two, or name one as mesh['name']"
            raise AttentionError(f"group is a DeviceMesh of {group.ndim} dimensions; {rule}")
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        rule = "it must be None, a ProcessGroup that this process is part of, or a DeviceMesh of one dimension"
        raise AttentionError(f"group is {kind_of(group)}; {rule}")
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group))


def ranks_of_mesh(mesh: Any) -> tuple[Ranks, Ranks]:
    """Return the ranks of the two dimensions of a mesh."""
    if not (isinstance(mesh, DeviceMesh) and mesh.ndim == 2):
        got = f"a DeviceMesh of {many(mesh.ndim, 'dimension')}" if isinstance(mesh, DeviceMesh) else kind_of(mesh)
        raise AttentionError(f"mesh is {got}; it must be a DeviceMesh of two dimensions (ring, heads)")
    return ranks_of(mesh.get_group(0)), ranks_of(mesh.get_group(1))
