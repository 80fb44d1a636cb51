"""The hosts in a URL, and the addresses behind their names."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from lmcache_core.errors import ConfigError, UnavailableError
from lmcache_core.storage.remote.members import MAX_ADDRESSES, Address
from lmcache_core.wire.client import DEFAULT_PORT

RESOLVE_TIMEOUT_S = 2.0

_NO_SUCH_HOST = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})


def hosts_of(url: str) -> list[Address]:
    """Host and port of each host in `lm://host[:port],host[:port],…`; IPv6 addresses stand in
    brackets.

    Raises:
        ConfigError: It is no such URL.
    """
    scheme, _, rest = url.partition("://")
    found: list[Address] = []
    for text in rest.removesuffix("/").split(","):
        try:
            parts = urlsplit(f"{scheme}://{text}")
            port = parts.port or DEFAULT_PORT
        except ValueError as exc:
            raise ConfigError(f"remote url {scheme}://…: {exc}") from exc
        if (
            not parts.hostname
            or parts.path
            or parts.query
            or parts.fragment
            or parts.username
            or parts.password
        ):
            raise ConfigError(
                f"remote url {scheme}://{parts.hostname}: must be {scheme}://host:port or"
                f" {scheme}://host:port,host:port, and the token an option of its own"
            )
        found.append(Address(parts.hostname, port, parts.hostname))
    if len(found) > MAX_ADDRESSES:
        raise ConfigError(
            f"remote url {scheme}://…: {len(found)} hosts; the limit is {MAX_ADDRESSES}"
        )
    return found


def is_literal(host: str) -> bool:
    """Whether that is an IP address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Resolver:
    """Finds the addresses of hosts, all those that each name has: a headless service has one for
    every pod.

    Args:
        hosts: Names or addresses, with their ports.
    """

    def __init__(self, hosts: Sequence[Address]) -> None:
        self._last: dict[Address, Sequence[Address]] = dict.fromkeys(hosts, ())

    async def __call__(self) -> list[Address]:
        """The addresses there are now. Those of a name that nobody can tell just now are as they
        were.

        Raises:
            UnavailableError: No name has an address.
        """
        hosts = list(self._last)
        for host, addresses in zip(
            hosts, await asyncio.gather(*map(self._resolved, hosts)), strict=True
        ):
            self._last[host] = addresses
        found = [address for addresses in self._last.values() for address in addresses]
        if not found:
            raise UnavailableError(f"{', '.join(host.name for host in hosts)}: no such host")
        return found

    async def _resolved(self, host: Address) -> Sequence[Address]:
        if is_literal(host.name):
            return [host]
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                found = await asyncio.get_running_loop().getaddrinfo(
                    host.name, host.port, type=socket.SOCK_STREAM
                )
        except socket.gaierror as exc:
            return [] if exc.errno in _NO_SUCH_HOST else self._last[host]
        except (OSError, UnicodeError):  # the former also of a time that is over
            return self._last[host]
        return list(
            dict.fromkeys(Address(str(address[0]), host.port, host.name) for *_, address in found)
        )
