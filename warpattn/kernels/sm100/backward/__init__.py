"""Gradients on Blackwell."""
