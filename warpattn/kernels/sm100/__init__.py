"""Blackwell (B200, GB200): FA4Config, and the prefill kernels with their roles in files of their own."""
