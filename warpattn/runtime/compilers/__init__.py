"""Processes that compile kernels, forked from a server that has imported what all of them need, once.

    server.py   the server, which begins before the caller imports torch
    digests.py  what it reads meanwhile
    begun.py    what it does for all of them
"""

from .server import KERNELS, PRELOADED, start

__all__ = ["KERNELS", "PRELOADED", "start"]
