"""Prefill on Blackwell with two query tiles a CTA."""
