"""Device code and its configurations, one folder per architecture over shared pieces."""
