"""A shared KV cache for LLM serving. Import from the packages below; this one imports nothing."""

__version__ = "0.1.0"
