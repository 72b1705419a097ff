"""Decode on Hopper: few query tokens over dense or paged keys."""
