"""The P2P broker: live peers, their addresses, and the choice of the peer that serves a pull."""
