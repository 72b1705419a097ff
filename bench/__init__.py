"""Benchmarks: cases × peers, timed in interleaved rounds, with the requirements they must meet as data.

    cases ─► inputs ─► correct (every peer against fp32) ─► timing (graphs, paired rounds) ─► record ─► table, plot

See README.md in this folder for the commands.
"""
