"""Latent attention (MLA, absorbed) on Blackwell."""
