"""What every NVIDIA kernel is built from: rings of tiles between warps."""
