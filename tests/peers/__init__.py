"""flash-attn's own test suites through the drop-ins: `python -m tests.peers CHECKOUT`, a folder that the user names."""
