"""The arena across restarts of the sidecar: what is lent and kept is written down, and what is
whole is served again (ADR 9).
"""
