"""The end of a sidecar: what only it holds is handed on to storage or to peers."""
