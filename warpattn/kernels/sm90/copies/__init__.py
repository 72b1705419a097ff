"""Hopper: a launch before prefill that copies K and V to 16 bits and pages of 128 keys."""
