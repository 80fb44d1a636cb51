"""Demonstrations of the KV cache that run without an accelerator."""
