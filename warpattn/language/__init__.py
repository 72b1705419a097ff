"""The language of masks and scores: functions are traced to nodes, which torch evaluates and kernels compile."""
