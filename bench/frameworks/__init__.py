"""What the integrations gain in transformers, diffusers and SGLang, each beside the framework's own attention."""
