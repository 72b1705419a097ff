"""A real vLLM or SGLang engine for each attention backend."""
