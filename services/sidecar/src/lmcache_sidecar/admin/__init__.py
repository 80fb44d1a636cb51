"""Status and administration of the sidecar for people."""
