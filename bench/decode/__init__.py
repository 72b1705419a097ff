"""Decode: one query of each request, dense and paged."""
