"""Processes that compile kernels, forked from a server that has imported everything they need once.

    server.py   starts the server, before the caller imports torch
    digests.py  reads Triton's files in a thread of the server
    begun.py    finishes the work that all forked processes share
"""

from .server import KERNELS, PRELOADED, can_be_sent, start

__all__ = ["KERNELS", "PRELOADED", "can_be_sent", "start"]
