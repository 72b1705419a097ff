"""The commands' parts for `--backward` and `--train`."""
