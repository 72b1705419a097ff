"""`flashinfer.quantization`: the packing of masks into bits."""

from warpattn.integrations.flashinfer.masks import packbits, segment_packbits

__all__ = ["packbits", "segment_packbits"]
