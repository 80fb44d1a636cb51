"""Backends that wrap a backend: what they add stands in no data path of their own."""

from lmcache_core.storage.wrappers.breaker import BreakerBackend, BreakerOptions
from lmcache_core.storage.wrappers.deadline import DeadlineBackend

__all__ = ["BreakerBackend", "BreakerOptions", "DeadlineBackend"]
