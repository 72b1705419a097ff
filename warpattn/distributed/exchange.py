"""Messages between neighbours in a ring of ranks, started beside the kernels and waited for when they are needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from warpattn.distributed.ranks import Ranks

__all__ = ["Messages", "pass_on"]


@dataclass
class Messages:
    """Tensors that arrive, and the ones that leave, which have to live until then."""

    arriving: list[Tensor]
    leaving: list[Tensor]
    works: list[dist.Work]

    def wait(self) -> list[Tensor]:
        """What has arrived; on a card, for kernels that torch's current stream is given from now on."""
        for work in self.works:
            work.wait()
        self.leaving = []
        return self.arriving


def pass_on(tensors: list[Tensor], ranks: Ranks, distance: int = 1) -> Messages:
    """Send contiguous tensors `distance` ranks on and take as many, of the same shapes, from as far behind."""
    arriving = [torch.empty_like(x) for x in tensors]
    there, here = ((ranks.rank + way) % ranks.size for way in (distance, -distance))
    sends = [dist.P2POp(dist.isend, x, group=ranks.group, group_peer=there) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, group=ranks.group, group_peer=here) for x in arriving]
    return Messages(arriving, tensors, dist.batch_isend_irecv([*sends, *receives]))
