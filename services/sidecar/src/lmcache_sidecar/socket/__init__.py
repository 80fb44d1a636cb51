"""The Unix socket through which the serving processes of the pod reach the sidecar."""
