"""The pod's sidecar."""
