"""Moves chunks to their homes when servers join or leave, and all chunks of a server that shuts
down.
"""
