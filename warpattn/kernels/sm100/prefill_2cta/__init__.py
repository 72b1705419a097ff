"""Prefill on Blackwell with a pair of CTAs that share their products."""
