"""Reads compiled machine code: registers, spills, counts and roles of NVIDIA's, order of copies in AMD's."""
