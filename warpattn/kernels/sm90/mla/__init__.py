"""Latent attention (MLA, absorbed) on Hopper."""
