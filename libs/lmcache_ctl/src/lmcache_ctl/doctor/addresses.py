"""Whether something listens at the addresses that settings files name, as seen from this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from lmcache_ctl.doctor.configuration import Loaded
from lmcache_ctl.doctor.findings import Finding, Level

CHECK: Final = "addresses"
OPTIONS: Final = ("lookup_url", "broker_url", "remote_url", "replicas_url", "otlp_endpoint")
DEFAULT_PORTS: Final = {"http": 80, "https": 443, "lm": 65432, "lm+tls": 65432, "redis": 6379, "rediss": 6379, "redis-sentinel": 26379}
MAX_ADDRESSES: Final = 64
FIX: Final = "start it, correct the address, or let the NetworkPolicy pass it; names of a cluster are known in its pods alone"


class _Address(NamedTuple):
    where: str
    option: str
    host: str
    port: int


def check_addresses(loaded: Sequence[Loaded], timeout_s: float) -> list[Finding]:
    """A connection to each is opened and ended, all at once; nothing is asked. Services start without them, and miss them later."""
    found: list[Finding] = []
    addresses: list[_Address] = []
    for file, settings in loaded:
        for option in OPTIONS:
            url: str | None = getattr(settings, option, None)
            if url is None:
                continue
            where = f"{file.kind} {file.path}"
            if url.startswith("file:"):
                found.append(_of_directory(where, option, Path(unquote(urlsplit(url).path))))
            else:
                addresses += [_Address(where, option, *each) for each in _hosts(url)]
    return found + asyncio.run(_of_all(list(dict.fromkeys(addresses))[:MAX_ADDRESSES], timeout_s))


async def _of_all(addresses: Sequence[_Address], timeout_s: float) -> list[Finding]:
    return list(await asyncio.gather(*(_of_one(address, timeout_s) for address in addresses)))


async def _of_one(address: _Address, timeout_s: float) -> Finding:
    at = f"{address.option} {address.host}:{address.port}"
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except (OSError, UnicodeError, TimeoutError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc) or f"no answer within {timeout_s:g} s"
        return Finding(Level.WARNING, CHECK, address.where, f"{at}: {reason}", FIX)
    writer.transport.abort()  # nothing was asked, so nothing is lost
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return Finding(Level.OK, CHECK, address.where, at)


def _of_directory(where: str, option: str, path: Path) -> Finding:
    if path.is_dir():
        return Finding(Level.OK, CHECK, where, f"{option} {path}")
    return Finding(
        Level.WARNING, CHECK, where, f"{option} {path} is no directory", "mount the shared volume there, or create the directory"
    )


def _hosts(url: str) -> list[tuple[str, int]]:
    """All that it names; an address that cannot be read has been refused with its settings."""
    scheme, _, rest = url.partition("://")
    parts = [urlsplit(f"//{text}") for text in rest.rpartition("@")[2].partition("/")[0].split(",")]
    return [(part.hostname, part.port or DEFAULT_PORTS[scheme]) for part in parts if part.hostname and scheme in DEFAULT_PORTS]
