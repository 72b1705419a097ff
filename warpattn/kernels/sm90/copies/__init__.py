"""Hopper: 16-bit copies of keys and values that prefill reads in their place, in whole tiles."""
