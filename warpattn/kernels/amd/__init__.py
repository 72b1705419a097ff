"""Pieces of kernels that CDNA3 and CDNA4 share: buffers for keys and values, order of workgroups."""
