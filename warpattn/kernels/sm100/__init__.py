"""Blackwell (B200): the prefill kernels and their host side."""
