"""Commands that prepare serving: `cache` and `warm` for compiled kernels, `tune` for measurements."""
