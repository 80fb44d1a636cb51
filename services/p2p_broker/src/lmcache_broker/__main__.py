"""The command `lmcache-broker`."""

from __future__ import annotations

import sys

from lmcache_servicekit.runner import run_service

from lmcache_broker.app import create_app
from lmcache_broker.settings import BrokerSettings


def main() -> int:
    """Run the broker until SIGTERM."""
    return run_service("lmcache-broker", BrokerSettings, create_app)


if __name__ == "__main__":
    sys.exit(main())
