"""Pulls: which peer serves which chunks."""
