"""The rungs of docs/ladder.md: kernels from a naive one to the parts of the shipped one, and what times them."""
