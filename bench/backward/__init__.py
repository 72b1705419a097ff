"""Gradients beside those of peers."""
