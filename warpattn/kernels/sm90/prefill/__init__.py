"""Prefill of dense batches on Hopper."""
