"""Shutdown of a sidecar: chunks that only it holds are handed over to storage or to peers."""
