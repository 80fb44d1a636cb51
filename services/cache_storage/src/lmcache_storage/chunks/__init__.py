"""Chunks over REST."""
