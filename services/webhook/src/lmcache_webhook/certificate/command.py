"""`lmcache-webhook certificate`: makes the certificate to serve with where there is none that will
do, and tells whom to trust.

To be run again at any time: it changes nothing that is good. As a Job before and after an
installation or upgrade (before, so that pods find their certificate; after, since only then there
is a configuration to tell), and now and then as a CronJob, which renews.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from typing import Final

from lmcache_core.errors import ConfigError, LMCacheError

from lmcache_webhook.certificate.authority import Lifetime, renew, why_renew
from lmcache_webhook.certificate.cluster import CertificateStore, LostRaceError

MAX_ATTEMPTS: Final = 3
MAX_DAYS: Final = 3650
EXIT_UNAVAILABLE: Final = 1
EXIT_BAD_CONFIG: Final = 2

Tell = Callable[[str], object]


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0 when a good certificate is there; 1 when the cluster did not let us, or cannot be reached;
        2 for bad arguments.
    """
    options = _parse(argv)
    names = [
        f"{options.service}.{options.namespace}.svc",
        f"{options.service}.{options.namespace}.svc.cluster.local",
    ]
    lifetime = Lifetime(
        datetime.timedelta(days=options.valid_days), datetime.timedelta(days=options.renew_days)
    )
    try:
        store = CertificateStore(
            options.namespace, options.secret, options.configuration, options.api_url
        )
        ensure_certificate(store, names, lifetime, _tell)
    except ConfigError as exc:
        _tell(str(exc))
        return EXIT_BAD_CONFIG
    except LMCacheError as exc:
        _tell(str(exc))
        return EXIT_UNAVAILABLE
    return 0


def ensure_certificate(
    store: CertificateStore, names: Sequence[str], lifetime: Lifetime, tell: Tell
) -> None:
    """Ensure that a store has a certificate that is good for some time, and that the API server
    trusts it.

    Args:
        store: Where it is kept.
        names: What it must be good for.
        lifetime: How long, and when it is renewed.
        tell: Gets a line for everything that is done.

    Raises:
        UnavailableError: The store cannot be used, or others write to it all the time.
    """
    for attempt in range(MAX_ATTEMPTS):
        material, version = store.read()
        now = datetime.datetime.now(datetime.UTC)
        reason = why_renew(material, names, lifetime, now)
        if reason is None:
            assert material is not None
            break
        material = renew(material, names, lifetime, now)
        try:
            store.write(material, version)
        except LostRaceError:
            if attempt + 1 == MAX_ATTEMPTS:
                raise
            continue
        tell(f"a new certificate for {names[0]}: {reason}")
        break
    assert material is not None
    num_told = store.trust(material.authorities)
    if num_told is None:
        tell("there is no webhook configuration yet: it is to be told by a later run")
    elif num_told:
        tell(f"{num_told} webhooks of the configuration now trust the authority")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lmcache-webhook certificate", allow_abbrev=False, description=__doc__
    )
    parser.add_argument("--namespace", required=True, help="of Secret and Service")
    parser.add_argument("--secret", required=True, help="Secret that the certificate is kept in")
    parser.add_argument(
        "--service", required=True, help="Service of the webhook, which the certificate is for"
    )
    parser.add_argument(
        "--configuration",
        required=True,
        help="MutatingWebhookConfiguration that is told whom to trust",
    )
    parser.add_argument(
        "--valid-days", type=int, default=90, help="how long a certificate is good (default: 90)"
    )
    parser.add_argument(
        "--renew-days",
        type=int,
        default=30,
        help="how long before its end it is replaced (default: 30)",
    )
    parser.add_argument("--api-url", help="API server, instead of the one of this pod's cluster")
    options = parser.parse_args(argv)
    if not 1 <= options.renew_days < options.valid_days <= MAX_DAYS:
        parser.error(
            f"--renew-days {options.renew_days} and --valid-days {options.valid_days}: 1 <= renew <"
            f" valid <= {MAX_DAYS}"
        )
    return options


def _tell(line: str) -> None:
    sys.stdout.write(f"lmcache-webhook certificate: {line}\n")
    sys.stdout.flush()
