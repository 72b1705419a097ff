"""Adapters that put warpattn into other frameworks, one module per framework, imported on demand."""
