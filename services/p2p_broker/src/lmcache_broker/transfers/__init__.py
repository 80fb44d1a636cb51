"""Who serves which pull."""
