"""The arena across restarts of the sidecar: lent and stored extents are journaled, and intact
chunks are served again (ADR 9).
"""
