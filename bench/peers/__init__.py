"""Every peer we measure against, one adapter per file, and warpattn itself.

An adapter never skips silently: `available()` says why it cannot run here, `prepare()` raises `Unsupported` for a case
it has no kernel for, and both reasons stand in the table and in the JSON.
"""

from bench.peers.adapter import Peer, Unsupported, first_line
from bench.peers.cudnn import Cudnn
from bench.peers.efficient import MemoryEfficient
from bench.peers.fa2 import FlashAttention2
from bench.peers.fa3 import FlashAttention3
from bench.peers.fa4 import FlashAttention4
from bench.peers.flashinfer import FlashInfer
from bench.peers.flex import FlexAttention
from bench.peers.modular_max import ModularMax
from bench.peers.own import Warpattn

OWN = "warpattn"

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Warpattn(),
        Cudnn(),
        FlashAttention2(),
        MemoryEfficient(),
        FlexAttention(),
        FlashAttention3(),
        FlashAttention4(),
        FlashInfer(),
        ModularMax(),
    )
}

__all__ = ["OWN", "PEERS", "Peer", "Unsupported", "first_line"]
