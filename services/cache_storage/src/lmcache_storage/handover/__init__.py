"""Moves chunks to their homes when servers come and go, and all of a server that ends."""
