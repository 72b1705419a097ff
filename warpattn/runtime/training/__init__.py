"""Gradients of calls that kernels run: autograd's function, the backward's launches, gradients of captured tensors."""
