"""Random serving steps, threads, processes, full memory."""
