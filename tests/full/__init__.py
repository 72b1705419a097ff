"""The whole matrix of kernels, masks and schedules in the simulator: `make test-full`, not part of `make test`."""
