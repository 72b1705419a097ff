"""Tests of the kernels on a card; all of them are skipped, with one reason, where there is no Hopper GPU."""
