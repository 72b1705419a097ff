"""Gradients of dense batches on Hopper."""
