"""Codecs: what they did, what they wrote, and what they can do here."""
