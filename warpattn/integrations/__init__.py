"""Adapters that put warpattn into other frameworks, one module per framework, imported only when asked for."""
