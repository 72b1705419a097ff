"""Decode on Hopper: few query tokens attend to dense or paged keys."""
