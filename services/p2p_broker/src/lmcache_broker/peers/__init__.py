"""Live peers: their addresses, owners and pulls."""
