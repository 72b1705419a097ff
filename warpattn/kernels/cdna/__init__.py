"""Attention on gfx942 (CDNA3) and gfx950 (CDNA4)."""
