"""A real vLLM engine for each attention backend."""
