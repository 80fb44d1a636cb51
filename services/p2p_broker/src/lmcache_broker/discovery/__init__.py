"""Peers that are known before they register: from a list, or from the cluster."""
