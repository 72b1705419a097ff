"""Device code and host values that kernels of all NVIDIA architectures share: rings, clipped TMA, backward kernels."""
