"""The rungs of docs/ladder.md: small kernels from a naive one to what the shipped one is made of, and what times them."""
