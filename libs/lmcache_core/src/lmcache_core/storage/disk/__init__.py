"""Chunks as files: one record each, complete or absent."""

from lmcache_core.storage.disk.backend import DiskBackend
from lmcache_core.storage.disk.files import DiskFiles

__all__ = ["DiskBackend", "DiskFiles"]
