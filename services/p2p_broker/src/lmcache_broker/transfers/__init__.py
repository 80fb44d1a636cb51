"""Pulls: the choice of the peer that serves each chunk."""
