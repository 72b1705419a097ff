"""Hopper prefill of 8-bit keys, values and queries: what only calls that have some enter."""
