"""The P2P broker: live peers, their addresses, and which of them serves a pull."""
