"""Leases of instances."""
