"""Context parallelism on torch.distributed, for sequences that do not fit one card.

    import warpattn.distributed as wad
    q, k, v = (wad.shard(x, 1) for x in (q, k, v))
    out = wad.ring_attention(q, k, v, mask=wa.Causal())

Kernels, rules and semantics are those of `warpattn.attention`; this package splits the problem and moves the parts.
"""

from warpattn.distributed.context import mesh_attention, ring_attention, ulysses_attention
from warpattn.distributed.paged import SharedPages, paged_attention, share_pages
from warpattn.distributed.shard import shard, unshard

__all__ = [
    "SharedPages",
    "mesh_attention",
    "paged_attention",
    "ring_attention",
    "shard",
    "share_pages",
    "ulysses_attention",
    "unshard",
]
