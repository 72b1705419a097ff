"""The cost model: records of a run, replayed with times."""
