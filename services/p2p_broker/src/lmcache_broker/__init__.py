"""The P2P broker: who is alive at which distributed URL, and who should serve which pull."""
