"""Prefill of ragged batches and paged caches on Hopper."""
