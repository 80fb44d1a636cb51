"""The mover of a sidecar: reads from other machines into the sidecar's arena."""
