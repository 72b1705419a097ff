"""The compiled TTGIR as Python values: operations, types, locations."""
