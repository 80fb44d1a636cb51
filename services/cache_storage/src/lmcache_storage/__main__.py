"""The command `lmcache-storage`."""

from __future__ import annotations

import sys

from lmcache_servicekit.runner import run_service

from lmcache_storage.app import create_app
from lmcache_storage.freed_memory import keep_freed_memory
from lmcache_storage.settings import StorageSettings


def main() -> int:
    """Run the storage until SIGTERM."""
    keep_freed_memory()
    return run_service("lmcache-storage", StorageSettings, create_app)


if __name__ == "__main__":
    sys.exit(main())
