"""The backward on NVIDIA GPUs, except the main kernel's matrix products, which each architecture has."""
