"""Peers that are known before they say anything: from a list, or from the cluster."""

from lmcache_broker.discovery.opening import Discovering, create_discovery

__all__ = ["Discovering", "create_discovery"]
