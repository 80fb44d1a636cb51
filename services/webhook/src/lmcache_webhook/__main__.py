"""The command `lmcache-webhook`: runs the webhook, or creates its certificate if the first argument
is `certificate`.
"""

from __future__ import annotations

import sys
from typing import Final

from lmcache_servicekit.runner import run_service

from lmcache_webhook.app import create_app
from lmcache_webhook.settings import WebhookSettings

CERTIFICATE: Final = "certificate"


def main() -> int:
    """Run the webhook until SIGTERM, or create a certificate."""
    if sys.argv[1:2] == [CERTIFICATE]:
        # Imported here: serving needs neither the API's client nor keys.
        from lmcache_webhook import certificate

        return certificate.main(sys.argv[2:])
    return run_service("lmcache-webhook", WebhookSettings, create_app)


if __name__ == "__main__":
    sys.exit(main())
