"""Figures and administration, for people."""
