"""The command `lmcache-sidecar`."""

from __future__ import annotations

import sys

from lmcache_servicekit.runner import run_service

from lmcache_sidecar.app import create_app
from lmcache_sidecar.settings import SidecarSettings


def main() -> int:
    """Run the sidecar until SIGTERM."""
    return run_service("lmcache-sidecar", SidecarSettings, create_app)


if __name__ == "__main__":
    sys.exit(main())
