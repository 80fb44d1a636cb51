"""The admission webhook that adds the cache sidecar to pods that ask for it."""
