"""What makes 8-bit values with scales, on every architecture."""
