"""The command `lmcache-webhook`: serves, or with `certificate` as its first argument makes the
certificate to serve with.
"""

from __future__ import annotations

import sys
from typing import Final

from lmcache_servicekit.runner import run_service

from lmcache_webhook.app import create_app
from lmcache_webhook.settings import WebhookSettings

CERTIFICATE: Final = "certificate"


def main() -> int:
    """Run the webhook until SIGTERM, or make a certificate."""
    if sys.argv[1:2] == [CERTIFICATE]:
        # Serving needs neither the API's client nor keys.
        from lmcache_webhook import certificate

        return certificate.main(sys.argv[2:])
    return run_service("lmcache-webhook", WebhookSettings, create_app)


if __name__ == "__main__":
    sys.exit(main())
