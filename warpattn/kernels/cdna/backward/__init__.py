"""Gradients on gfx942 and gfx950: one kernel for dQ, one for dK and dV."""
