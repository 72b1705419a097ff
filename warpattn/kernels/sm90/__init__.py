"""Kernels for Hopper (H100, H200): dense prefill, ragged and paged prefill, decode, MLA, backward."""
