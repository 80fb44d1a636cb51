"""Check that certificates are valid for long enough."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from lmcache_core.errors import LMCacheError
from lmcache_core.security import tls

from lmcache_ctl.asking import tls_context
from lmcache_ctl.doctor.findings import Finding, Subject
from lmcache_ctl.options import CtlSettings
from lmcache_ctl.services import Endpoint

SOON_DAYS: Final = 14.0
DAY_S: Final = 86_400.0
CLOSING_S: Final = 0.01
"""For the loop to let go of connections that were given up."""
HANDSHAKE_TURNS: Final = 4
CHECK: Final = "certificate"
FIX: Final = (
    "have another one issued, or correct the clock that is wrong; services take new files by"
    " themselves"
)
OUT_OF_TIME: Final = frozenset({9, 10})
"""OpenSSL's codes for a certificate that is not valid yet, and for one that has expired."""


async def check_certificates(settings: CtlSettings, services: Sequence[Endpoint]) -> list[Finding]:
    """Check the certificate of every https service."""
    chosen = [one for one in services if one.url.startswith("https:") and not one.problem]
    found = list(await asyncio.gather(*(_of_one(settings, service) for service in chosen)))
    await asyncio.sleep(CLOSING_S)
    return found


async def _of_one(settings: CtlSettings, service: Endpoint) -> Finding:
    subject = Subject(CHECK, f"{service.kind} {service.name}")
    try:
        async with asyncio.timeout(settings.timeout_s):
            begins_s, ends_s = await _shown_validity(settings, service)
    except ssl.SSLCertVerificationError as exc:
        fix = FIX if exc.verify_code in OUT_OF_TIME else "give its authority with --tls CA"
        return subject.error(f"not trusted: {exc.verify_message}", fix)
    except (OSError, TimeoutError) as exc:
        what = f"none was shown: {str(exc) or 'no answer in time'}"
        return subject.error(what, "see what is said of reachable")
    return _until(subject, "", begins_s, ends_s)


def check_identity(where: str, option: str, cert: Path, load: Callable[[], object]) -> Finding:
    """Check that the service accepts a certificate file and its key, and for how long.

    Args:
        where: Of which settings.
        option: That names the certificate.
        load: Loads both as the service does.
    """
    subject = Subject(CHECK, where)
    tls.logger.disabled = True  # what it would warn of is a finding here
    try:
        load()
        begins_s, ends_s = tls.certificate_validity(cert)
    except LMCacheError as exc:
        fix = "mount the certificate and the key that were issued together"
        return subject.error(str(exc), fix)
    finally:
        tls.logger.disabled = False
    return _until(subject, f"{option} {cert} ", begins_s, ends_s)


def check_chain(where: str, option: str, files: tls.TlsFiles) -> Iterator[Finding]:
    """Check that clients with the service's own authorities accept its certificate.

    Args:
        where: Of which settings.
        option: That names the certificate.
        files: The certificate, its key, and the authorities; `check_identity` reports a broken
            pair.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(str(files.cert_file), files.key_file, password="")
        client = ssl.create_default_context(cafile=str(files.ca_file))
        client.check_hostname = False  # by which name it is called is not known here
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as exc:
        fix = "append the certificates between it and the root, or trust its own authority"
        what = f"{option} {files.cert_file} is not trusted by tls_ca_file {files.ca_file}"
        yield Subject(CHECK, where).warning(f"{what}: {exc.verify_message}", fix)
    except (OSError, ValueError):
        return


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Run a TLS handshake in memory; raise the error of either side."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(HANDSHAKE_TURNS):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()


def _until(subject: Subject, what: str, begins_s: float, ends_s: float) -> Finding:
    if problem := tls.validity_problem(begins_s, ends_s):
        return subject.error(f"{what}{problem}", FIX)
    days = (ends_s - time.time()) / DAY_S
    if days < SOON_DAYS:
        return subject.warning(f"{what}ends in {days:.1f} days", FIX)
    return subject.ok(f"{what}good for {days:.0f} days".strip())


async def _shown_validity(settings: CtlSettings, service: Endpoint) -> tuple[float, float]:
    """Return the Unix times between which the certificate that is shown is valid."""
    parts = urlsplit(service.url)
    name = service.tls_name or parts.hostname
    context = tls_context(settings.tls)
    how: dict[str, Any] = {"ssl": context, "server_hostname": name}
    if service.socket_path is None:
        _, writer = await asyncio.open_connection(parts.hostname, parts.port or 443, **how)
    else:
        _, writer = await asyncio.open_unix_connection(service.socket_path, **how)
    try:
        certificate = writer.get_extra_info("peercert") or {}
        begins_s, ends_s = (
            float(ssl.cert_time_to_seconds(certificate[name])) for name in ("notBefore", "notAfter")
        )
        return begins_s, ends_s
    finally:
        # nothing was asked, so nothing is lost; a goodbye might not be answered
        writer.transport.abort()
