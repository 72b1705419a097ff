"""Configurations that were measured on this machine's own card, and how a plan finds them."""
