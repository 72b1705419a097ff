"""Reads compiled machine code: registers, spills, counts, roles (NVIDIA); order of copies and loads (AMD)."""
