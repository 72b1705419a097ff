"""Gradients of calls that kernels run: the autograd function, the backward's launches, captured tensors."""
