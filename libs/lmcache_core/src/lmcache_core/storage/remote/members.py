"""The servers of a replicated remote tier: found by address, identified by the name that each
reports.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import ConfigError, LMCacheError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.lookup import LookupClient
from lmcache_core.wire.backoff import Backoff
from lmcache_core.wire.client import DEFAULT_PORT, LmClient
from lmcache_core.wire.messages import ANY_SERVER

logger = logging.getLogger(__name__)

REFRESH_S = 5.0
IMPATIENT_REFRESH_S = 0.5
"""Refresh interval while a server has not reported its name, or none can be found."""
GREETING_S = 1.0
MAX_ADDRESSES = 256
REST_INITIAL_S = 0.5
REST_CAP_S = 10.0
"""How long a server that does not answer is not asked; until then its chunks belong to their next
choices.
"""


class ServerAddress(NamedTuple):
    """The address of a server.

    Attributes:
        name: Name that resolved to it, which its certificate must contain if it has one.
    """

    host: str
    port: int
    name: str


FindAddresses = Callable[[], Awaitable[Sequence[ServerAddress]]]
MakeClient = Callable[[ServerAddress], LmClient]


class Member:
    """One server."""

    def __init__(self, address: ServerAddress, client: LmClient) -> None:
        self.client = client
        self._address = address
        self._rest = Backoff(REST_INITIAL_S, REST_CAP_S, time.monotonic)

    @property
    def name(self) -> str | None:
        """The name that it reports, kept while it is unreachable; its address if it reports no
        name; None if it was never reached.
        """
        server = self.client.server
        return (
            f"{self._address.host}:{self._address.port}" if server in (ANY_SERVER, "") else server
        )

    @property
    def is_resting(self) -> bool:
        """Whether it failed to answer recently and is not asked for now."""
        return self._rest.wait_s > 0

    def answered(self) -> None:
        """Record an answer: ask it again from now on."""
        self._rest.succeeded()

    def failed(self) -> None:
        """Record a missing answer: do not ask it for a while."""
        if not self.is_resting:
            self._rest.failed()


class Members:
    """Keeps the set of servers up to date. For one event loop.

    Args:
        find: Returns the current addresses; may raise `UnavailableError`, in which case those known
            before remain.
        make_client: Creates the client of a server.
        name: Name of the set, for logs.
    """

    def __init__(self, find: FindAddresses, make_client: MakeClient, name: str) -> None:
        self._find = find
        self._make_client = make_client
        self._name = name
        self._by_address: dict[ServerAddress, Member] = {}
        self._tasks = TaskSupervisor("replicas", max_tasks=2)
        self._reported: tuple[str, str] | None = None
        self._is_found = False

    async def open(self) -> None:
        """Find the servers, as far as possible now, and keep looking in the background."""
        await self.refresh()
        self._tasks.start("refresh", self._keep_fresh())

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._tasks.close()
        await self._close(list(self._by_address))

    def by_name(self) -> dict[str, Member]:
        """Return every server that has reported its name. A server with several addresses appears
        once, preferably by a connected one.
        """
        found: dict[str, Member] = {}
        for member in self._by_address.values():
            name = member.name
            if name is not None and (
                name not in found
                or (member.client.is_connected and not found[name].client.is_connected)
            ):
                found[name] = member
        return found

    async def refresh(self) -> None:
        """Update the addresses, and connect to servers that have not reported their names or are
        not connected.
        """
        try:
            addresses = list(dict.fromkeys(await self._find()))[:MAX_ADDRESSES]
        except UnavailableError as exc:
            self._is_found = bool(self._by_address)
            logger.debug("servers not found: service=%s error=%s", self._name, exc)
        else:
            self._is_found = True
            await self._close(self._by_address.keys() - set(addresses))
            for address in addresses:
                if address not in self._by_address:
                    self._by_address[address] = Member(address, self._make_client(address))
        await asyncio.gather(
            *(
                self._greet(member)
                for member in self._by_address.values()
                if not member.client.is_connected
            )
        )
        self._report()

    async def _keep_fresh(self) -> None:
        while True:
            is_complete = self._is_found and all(
                member.name is not None for member in self._by_address.values()
            )
            await asyncio.sleep(REFRESH_S if is_complete else IMPATIENT_REFRESH_S)
            await self.refresh()

    async def _greet(self, member: Member) -> None:
        try:
            await member.client.ping(GREETING_S)
        except LMCacheError as exc:
            logger.debug("server does not answer: service=%s error=%s", self._name, exc)
        else:
            member.answered()

    async def _close(self, addresses: Iterable[ServerAddress]) -> None:
        for address in list(addresses):
            member = self._by_address.pop(address, None)
            if member is not None:
                await member.client.close()

    def _report(self) -> None:
        names = ",".join(sorted(self.by_name())) or "-"
        addresses = ",".join(sorted(f"{one.host}:{one.port}" for one in self._by_address)) or "-"
        if self._reported != (names, addresses):
            self._reported = (names, addresses)
            logger.info(
                "servers known: service=%s servers=%s addresses=%s", self._name, names, addresses
            )


RESOLVE_TIMEOUT_S = 2.0

_NO_SUCH_HOST = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})


def hosts_of(url: str) -> list[ServerAddress]:
    """Return host and port of each host in `lm://host[:port],host[:port],…`; IPv6 addresses are in
    brackets.

    Raises:
        ConfigError: The URL is malformed.
    """
    scheme, _, rest = url.partition("://")
    found: list[ServerAddress] = []
    for text in rest.removesuffix("/").split(","):
        try:
            parts = urlsplit(f"{scheme}://{text}")
            port = parts.port or DEFAULT_PORT
        except ValueError as exc:
            raise ConfigError(f"the URL {scheme}://…: {exc}") from exc
        if (
            not parts.hostname
            or parts.path
            or parts.query
            or parts.fragment
            or parts.username
            or parts.password
        ):
            raise ConfigError(
                f"the URL {scheme}://{parts.hostname}: must be {scheme}://host:port or"
                f" {scheme}://host:port,host:port, and the token an option of its own"
            )
        found.append(ServerAddress(parts.hostname, port, parts.hostname))
    if len(found) > MAX_ADDRESSES:
        raise ConfigError(f"the URL {scheme}://…: {len(found)} hosts; the limit is {MAX_ADDRESSES}")
    return found


def is_literal(host: str) -> bool:
    """Return whether that is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Resolver:
    """Resolves hosts to all their addresses: a headless service has one for every pod.

    Args:
        hosts: Names or addresses, with their ports.
    """

    def __init__(self, hosts: Sequence[ServerAddress]) -> None:
        self._last: dict[ServerAddress, Sequence[ServerAddress]] = dict.fromkeys(hosts, ())

    async def __call__(self) -> list[ServerAddress]:
        """Return the current addresses. A name that cannot be resolved now keeps its previous ones.

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

    async def _resolved(self, host: ServerAddress) -> Sequence[ServerAddress]:
        if is_literal(host.name):
            return [host]
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                found = await asyncio.get_running_loop().getaddrinfo(
                    host.name, host.port, type=socket.SOCK_STREAM
                )
        except socket.gaierror as exc:
            return [] if exc.errno in _NO_SUCH_HOST else self._last[host]
        except (OSError, UnicodeError):  # OSError includes timeouts
            return self._last[host]
        return list(
            dict.fromkeys(
                ServerAddress(str(address[0]), host.port, host.name) for *_, address in found
            )
        )


MAX_QUESTIONS = 4
"""Lookup returns the longest prefix that has holders: each chunk without one costs a query."""


async def locate_by_lookup(lookup: LookupClient, keys: Sequence[ChunkKey]) -> list[list[str]]:
    """Return the instances that hold each chunk; none if unknown.

    Args:
        lookup: An open client.

    Raises:
        UnavailableError: Lookup did not answer.
    """
    chunk_ids = [key.key.chunk_id() for key in keys]
    found: list[list[str]] = []
    for _ in range(MAX_QUESTIONS):
        if len(found) >= len(chunk_ids):
            break
        answer = await lookup.lookup(chunk_ids[len(found) :])
        if answer.degraded:
            break
        found += [[holder.instance for holder in holders] for holders in answer.holders]
        if len(found) < len(chunk_ids):
            found.append([])  # the first chunk without a holder
    return found + [[] for _ in range(len(chunk_ids) - len(found))]
