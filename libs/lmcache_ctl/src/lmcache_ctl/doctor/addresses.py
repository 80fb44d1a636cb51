"""Check that something listens at the addresses in the settings files, as seen from this
machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from lmcache_core.config.options import directory_of_url, shown
from lmcache_core.errors import ConfigError
from lmcache_core.wire.json_http import check_base_url

from lmcache_ctl.asking import run_all
from lmcache_ctl.doctor.configuration import ENGINE, Loaded
from lmcache_ctl.doctor.findings import Finding, Subject

CHECK: Final = "addresses"
OPTIONS: Final = ("lookup_url", "broker_url", "remote_url", "replicas_url", "otlp_endpoint")
DEFAULT_PORTS: Final = {
    "http": 80,
    "https": 443,
    "lm": 65432,
    "lm+tls": 65432,
    "redis": 6379,
    "rediss": 6379,
    "redis-sentinel": 26379,
}
MAX_ADDRESSES: Final = 64
FIX: Final = (
    "start it, correct the address, or let the NetworkPolicy pass it; names of a cluster are known"
    " in its pods alone"
)


class _Address(NamedTuple):
    where: str
    option: str
    host: str
    port: int | None
    """None: the host is the path of a Unix socket."""


def check_addresses(loaded: Sequence[Loaded], timeout_s: float) -> list[Finding]:
    """Open and close a connection to each, concurrently; send no request.

    Services start without these addresses, and need them later.
    """
    found: list[Finding] = []
    addresses: list[_Address] = []
    for file, settings in loaded:
        where = f"{file.kind} {file.path}"
        for option in OPTIONS:
            url: str | None = getattr(settings, option, None)
            if url is None:
                continue
            if file.kind == ENGINE and (problem := _not_http(option, url)):
                fix = "correct it, or leave it out where nothing needs it"
                found.append(Subject(CHECK, where).error(problem, fix))
            elif url.startswith("file:"):
                found.append(_of_directory(where, option, Path(directory_of_url(url))))
            else:
                addresses += [_Address(where, option, *each) for each in _hosts(url)]
        socket_path: str | None = getattr(settings, "sidecar_socket", None)
        if socket_path is not None:
            addresses.append(_Address(where, "sidecar_socket", socket_path, None))
    chosen = list(dict.fromkeys(addresses))[:MAX_ADDRESSES]
    return found + run_all(_of_one(address, timeout_s) for address in chosen)


async def _of_one(address: _Address, timeout_s: float) -> Finding:
    subject = Subject(CHECK, address.where)
    host, port = address.host, address.port
    what = f"{address.option} {host}" if port is None else f"{address.option} {host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            if port is None:
                _, writer = await asyncio.open_unix_connection(host)
            else:
                _, writer = await asyncio.open_connection(host, port)
    except (OSError, UnicodeError, TimeoutError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc) or f"no answer within {timeout_s:g} s"
        return subject.warning(f"{what}: {reason}", FIX)
    writer.transport.abort()  # nothing was asked, so nothing is lost
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return subject.ok(what)


def _of_directory(where: str, option: str, path: Path) -> Finding:
    try:
        is_directory = path.is_dir()
    except OSError:
        is_directory = False
    if is_directory:
        return Subject(CHECK, where).ok(f"{option} {path}")
    fix = "mount the shared volume there, or create the directory"
    return Subject(CHECK, where).warning(f"{option} {path} is not a directory", fix)


def _not_http(option: str, url: str) -> str:
    """Return what is wrong with the URL of an engine's HTTP service, "" for nothing.

    The engine's settings leave that to the client.
    """
    if option == "remote_url":
        return ""
    try:
        check_base_url("its", url)
    except ConfigError as exc:
        return f"{option}={shown(url)}: {str(exc).removeprefix('its URL: ')}"
    return ""


def _hosts(url: str) -> list[tuple[str, int]]:
    """Return every host that the URL names; an unreadable URL was refused with its settings."""
    scheme, _, rest = url.partition("://")
    parts = [urlsplit(f"//{text}") for text in rest.rpartition("@")[2].partition("/")[0].split(",")]
    return [
        (part.hostname, part.port or DEFAULT_PORTS[scheme])
        for part in parts
        if part.hostname and scheme in DEFAULT_PORTS
    ]
