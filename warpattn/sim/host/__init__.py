"""Runs launches of other people's programs in the simulator: `kernel[grid](…)` inside `launches(…)`, scripts, tests."""
