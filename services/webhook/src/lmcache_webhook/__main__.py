"""The command `lmcache-webhook`."""

from __future__ import annotations

import sys

from lmcache_servicekit.runner import run_service

from lmcache_webhook.app import create_app
from lmcache_webhook.settings import WebhookSettings


def main() -> int:
    """Run the webhook until SIGTERM."""
    return run_service("lmcache-webhook", WebhookSettings, create_app)


if __name__ == "__main__":
    sys.exit(main())
