"""What kernels of all NVIDIA architectures share: rings, clipped TMA, backward kernels."""
