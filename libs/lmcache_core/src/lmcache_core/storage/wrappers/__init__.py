"""Backends that wrap a backend: what they add stands in no data path of their own."""

from lmcache_core.storage.wrappers.base import WrapperBackend, lister_of
from lmcache_core.storage.wrappers.breaker import BreakerBackend, BreakerOptions
from lmcache_core.storage.wrappers.encoded import EncodedBackend
from lmcache_core.storage.wrappers.faults import FaultPlan, FaultyBackend
from lmcache_core.storage.wrappers.logged import LoggedBackend
from lmcache_core.storage.wrappers.metered import MeteredBackend
from lmcache_core.storage.wrappers.traced import TracedBackend

__all__ = [
    "BreakerBackend",
    "BreakerOptions",
    "EncodedBackend",
    "FaultPlan",
    "FaultyBackend",
    "LoggedBackend",
    "MeteredBackend",
    "TracedBackend",
    "WrapperBackend",
    "lister_of",
]
