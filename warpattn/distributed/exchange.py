"""Messages between ranks, which run beside kernels until their tensors are needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from warpattn.distributed.ranks import Ranks


@dataclass
class Messages:
    """Tensors that arrive, and those being sent, which must live until then."""

    arriving: list[Tensor]
    leaving: list[Tensor]
    works: list[dist.Work]

    def wait(self) -> list[Tensor]:
        """Wait for the arriving tensors and return them; on a card, torch's current stream waits for them."""
        for work in self.works:
            work.wait()
        self.leaving = []
        return self.arriving


def pass_on(tensors: list[Tensor], ranks: Ranks, distance: int = 1) -> Messages:
    """Send contiguous tensors `distance` ranks ahead and receive tensors of the same shapes from as far behind."""
    there, here = ((ranks.rank + way) % ranks.size for way in (distance, -distance))
    arriving = [torch.empty_like(x) for x in tensors]
    return _start(tensors, [there] * len(tensors), arriving, [here] * len(tensors), ranks)


def trade(leaving: list[Tensor], arriving: list[Tensor], others: list[int], ranks: Ranks) -> Messages:
    """Send contiguous tensors, each to its rank in `others`, and receive one from that rank into `arriving`."""
    return _start(leaving, others, arriving, others, ranks)


def _start(leaving: list[Tensor], to: list[int], arriving: list[Tensor], of: list[int], ranks: Ranks) -> Messages:
    pairs = [(dist.isend, *pair) for pair in zip(leaving, to, strict=True)]
    pairs += [(dist.irecv, *pair) for pair in zip(arriving, of, strict=True)]
    messages = [dist.P2POp(op, x, group=ranks.group, group_peer=rank) for op, x, rank in pairs]
    return Messages(arriving, leaving, dist.batch_isend_irecv(messages) if messages else [])
