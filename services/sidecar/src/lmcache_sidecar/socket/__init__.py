"""The Unix socket on which the serving processes of the pod reach the sidecar."""
