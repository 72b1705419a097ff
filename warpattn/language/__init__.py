"""The language of masks and scores: functions are traced to expressions, which torch evaluates and kernels compile."""
