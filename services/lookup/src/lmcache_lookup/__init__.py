"""The lookup service: which instance holds which chunk of cached KV."""
