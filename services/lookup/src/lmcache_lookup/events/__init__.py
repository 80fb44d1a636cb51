"""Sequenced stores and removals."""
