"""The servers of a replicated remote tier: found by address, told apart by the name that each
gives itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import LMCacheError, UnavailableError
from lmcache_core.wire.backoff import Backoff
from lmcache_core.wire.client import LmClient
from lmcache_core.wire.messages import ANY_SERVER

logger = logging.getLogger(__name__)

REFRESH_S = 5.0
IMPATIENT_REFRESH_S = 0.5
"""While a server has not told its name yet, and while nobody can be found."""
GREETING_S = 1.0
MAX_ADDRESSES = 256
REST_INITIAL_S = 0.5
REST_CAP_S = 10.0
"""A server that does not answer is not asked for that long; its chunks are then those of their
next choice.
"""


class Address(NamedTuple):
    """Where a server is.

    Attributes:
        host: What is connected to.
        port: Its port.
        name: The name that led there, which its certificate has if it has one.
    """

    host: str
    port: int
    name: str


FindAddresses = Callable[[], Awaitable[Sequence[Address]]]
MakeClient = Callable[[Address], LmClient]


class Member:
    """One server.

    Args:
        address: Where it is.
        client: Speaks to it.
    """

    def __init__(self, address: Address, client: LmClient) -> None:
        self.client = client
        self._address = address
        self._rest = Backoff(REST_INITIAL_S, REST_CAP_S, time.monotonic)

    @property
    def name(self) -> str | None:
        """What it calls itself, also while it is away; its address, if it has no name of its
        own; None: it was never reached.
        """
        server = self.client.server
        return (
            f"{self._address.host}:{self._address.port}" if server in (ANY_SERVER, "") else server
        )

    @property
    def is_resting(self) -> bool:
        """Whether it did not answer lately and is left alone for now."""
        return self._rest.wait_s > 0

    def answered(self) -> None:
        """It answered."""
        self._rest.succeeded()

    def failed(self) -> None:
        """It did not answer."""
        if not self.is_resting:
            self._rest.failed()


class Members:
    """Keeps the set of servers up to date. On one event loop.

    Args:
        find: Tells the addresses there are now; may raise `UnavailableError`, and those known
            before then stay.
        make_client: Makes the client for one of them.
        name: The set, for logs.
    """

    def __init__(self, find: FindAddresses, make_client: MakeClient, name: str) -> None:
        self._find = find
        self._make_client = make_client
        self._name = name
        self._by_address: dict[Address, Member] = {}
        self._tasks = TaskSupervisor("replicas", max_tasks=2)
        self._known: frozenset[str] = frozenset()
        self._is_found = False

    async def open(self) -> None:
        """Find them, as far as that can be done now, and go on finding them in the background."""
        await self.refresh()
        self._tasks.start("refresh", self._keep_fresh())

    async def close(self) -> None:
        """End all connections. Idempotent."""
        await self._tasks.close()
        await self._close(list(self._by_address))

    def by_name(self) -> dict[str, Member]:
        """Every server that has told its name. One that several addresses lead to is there once,
        by one that is connected if any is.
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
        """Take the addresses as they are now, and greet those that have not told their names or
        are not connected.
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

    async def _close(self, addresses: Iterable[Address]) -> None:
        for address in list(addresses):
            member = self._by_address.pop(address, None)
            if member is not None:
                await member.client.close()

    def _report(self) -> None:
        known = frozenset(self.by_name())
        if known != self._known:
            logger.info(
                "servers known: service=%s servers=%s", self._name, ",".join(sorted(known)) or "-"
            )
            self._known = known
