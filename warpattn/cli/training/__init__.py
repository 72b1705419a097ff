"""What the commands do with `--backward` and `--train`."""
