"""What becomes of chunks when servers come and go: they move to their homes, and a server that
ends leaves none behind.
"""
