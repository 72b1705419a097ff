"""Commands that prepare serving: the folder of kernels, and what is measured on a card."""
