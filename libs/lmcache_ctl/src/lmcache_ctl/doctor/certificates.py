"""Whether certificates are good for long enough."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from lmcache_ctl.cluster.services import Service
from lmcache_ctl.doctor.findings import Finding, Level
from lmcache_ctl.rest import tls_context
from lmcache_ctl.settings import CtlSettings

SOON_DAYS: Final = 14.0
DAY_S: Final = 86_400.0
CLOSING_S: Final = 0.01
"""For the loop to let go of connections that were given up."""
CHECK: Final = "certificate"
FIX: Final = "issue it anew; services take new files by themselves"


async def check_certificates(settings: CtlSettings, services: Sequence[Service]) -> list[Finding]:
    """Of all services that are asked by https."""
    chosen = [service for service in services if service.url.startswith("https:") and not service.problem]
    found = list(await asyncio.gather(*(_of_one(settings, service) for service in chosen)))
    await asyncio.sleep(CLOSING_S)
    return found


async def _of_one(settings: CtlSettings, service: Service) -> Finding:
    where = f"{service.kind} {service.name}"
    try:
        async with asyncio.timeout(settings.timeout_s):
            ends_s = await _end_of(settings, service)
    except ssl.SSLCertVerificationError as exc:
        return Finding(Level.ERROR, CHECK, where, f"not trusted: {exc.verify_message}", "give its authority by --tls CA, or issue it anew")
    except (OSError, TimeoutError) as exc:
        return Finding(Level.ERROR, CHECK, where, f"none was shown: {str(exc) or 'no answer in time'}", "see what is said of reachable")
    days = (ends_s - time.time()) / DAY_S
    if days < SOON_DAYS:
        return Finding(Level.WARNING, CHECK, where, f"ends in {days:.1f} days", FIX)
    return Finding(Level.OK, CHECK, where, f"good for {days:.0f} days")


async def _end_of(settings: CtlSettings, service: Service) -> float:
    """Unix time at which the certificate that is shown ends."""
    parts = urlsplit(service.url)
    name = service.tls_name or parts.hostname
    context = tls_context(settings.tls)
    if service.socket_path is None:
        _, writer = await asyncio.open_connection(parts.hostname, parts.port or 443, ssl=context, server_hostname=name)
    else:
        _, writer = await asyncio.open_unix_connection(service.socket_path, ssl=context, server_hostname=name)
    try:
        certificate = writer.get_extra_info("peercert") or {}
        return float(ssl.cert_time_to_seconds(certificate["notAfter"]))
    finally:
        writer.transport.abort()  # nothing was asked, so nothing is lost; a goodbye might not be answered
