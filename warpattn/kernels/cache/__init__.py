"""What fills a paged cache, on every architecture: no tensor cores, no pipelines, so one kernel serves all."""
