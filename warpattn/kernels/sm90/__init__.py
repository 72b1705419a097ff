"""Hopper (H100, H200): the prefill kernel and its host side."""
