"""8-bit keys and values: time and error."""
