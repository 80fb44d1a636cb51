"""The command `lmcache-storage`."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

from lmcache_servicekit.runner import run_service

from lmcache_storage.app import create_app
from lmcache_storage.settings import StorageSettings

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Source: mallopt(3), malloc.h of glibc."""
KEPT_BYTES: Final = 16 << 20
LARGEST_KEPT_BYTES: Final = 1 << 20


def keep_freed_memory() -> bool:
    """Let this process keep a little of the memory that it frees, to use it again.

    Bodies come and go in pieces of some 100 KiB. By default the C library gives each back to the
    system, which then clears a page at a time for the next: more than half of the processor time of
    storing 32 MiB over REST.

    Returns:
        Whether the C library can be told.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)) and bool(
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
    )


def main() -> int:
    """Run the storage until SIGTERM."""
    keep_freed_memory()
    return run_service("lmcache-storage", StorageSettings, create_app)


if __name__ == "__main__":
    sys.exit(main())
