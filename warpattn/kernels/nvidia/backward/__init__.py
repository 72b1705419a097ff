"""The backward on NVIDIA GPUs, except an architecture's matrix products."""
