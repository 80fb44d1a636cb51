"""Figures and upkeep."""
