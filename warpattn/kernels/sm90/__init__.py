"""Hopper (H100, H200): dense prefill, prefill of ragged batches and pages, decode, latent attention."""
