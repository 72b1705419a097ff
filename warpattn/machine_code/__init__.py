"""Reads compiled machine code: registers, spills and instruction counts of NVIDIA's, order of copies in AMD's."""
