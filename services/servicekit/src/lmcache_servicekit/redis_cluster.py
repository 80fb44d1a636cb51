"""Pipelines to a Redis Cluster: each server gets its part at the same time. And the client for any
URL.
"""

from __future__ import annotations

import asyncio
import binascii
import bisect
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

from lmcache_core.concurrency import cancel_and_join
from redis.exceptions import AskError, MovedError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as LostConnectionError
from typing_extensions import override

from lmcache_servicekit.redis_client import (
    CLIENT_ERRORS,
    MAX_CONNECTIONS,
    RedisAccess,
    RedisClient,
    RedisCommand,
    RedisNode,
    checked,
)
from lmcache_servicekit.redis_settings import Address

NUM_SLOTS: Final = 16_384
MAX_SERVERS_ASKED: Final = 8
MAX_REDIRECTIONS: Final = 3

_ASK_FOR_SLOTS: Final = RedisCommand("", ("CLUSTER", "SLOTS"))
_PING: Final = RedisCommand("", ("PING",))

_Ranges = list[tuple[int, int, Address]]
"""First slot, last slot, master; in order."""


class SlotsUnknownError(LostConnectionError):
    """No server of the cluster knows which server has a slot."""


def slot_of(key: str) -> int:
    """Return the slot of a key with a hash tag."""
    tag = key[key.index("{") + 1 : key.index("}")]
    return binascii.crc_hqx(tag.encode(), 0) % NUM_SLOTS


class ClusterMap:
    """The assignment of slots to servers, as far as known.

    Asks a few servers concurrently and adopts the first complete answer; a server that does not
    have a slot reports that when it is used.

    Args:
        seeds: Servers to begin with.
        make_node: Creates the connections to a server; they belong to this object.
    """

    def __init__(self, seeds: Sequence[Address], make_node: Callable[[Address], RedisNode]) -> None:
        self._seeds = frozenset(seeds)
        self._make_node = make_node
        self._nodes: dict[Address, RedisNode] = {}
        self._ranges: _Ranges = []
        self._last_slots: list[int] = []
        self._refreshing = asyncio.Lock()
        self.is_stale = True

    async def close(self) -> None:
        """Close all connections."""
        nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            await node.close()

    def node_at(self, address: Address) -> RedisNode:
        """Return the connections to one server."""
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._make_node(address)
        return node

    def node_of(self, slot: int) -> RedisNode:
        """Return the master of a slot.

        Raises:
            SlotsUnknownError: No server is known to have it.
        """
        place = bisect.bisect_left(self._last_slots, slot)
        if place < len(self._ranges) and self._ranges[place][0] <= slot:
            return self.node_at(self._ranges[place][2])
        self.is_stale = True
        raise SlotsUnknownError(f"no server is known to have slot {slot}")

    def masters(self) -> list[RedisNode]:
        """Return every server with slots."""
        return [
            self.node_at(address) for address in sorted({address for _, _, address in self._ranges})
        ]

    async def refresh(self) -> None:
        """Refresh the map if it is stale. Callers that arrive during a refresh wait for the same
        answer.

        Raises:
            SlotsUnknownError: No server answered.
        """
        async with self._refreshing:
            if not self.is_stale:
                return
            self._ranges = await self._ask_some()
            self._last_slots = [last for _, last, _ in self._ranges]
            self.is_stale = False
            await self._forget_others()

    async def _ask_some(self) -> _Ranges:
        known = sorted(set(self._nodes) | self._seeds)
        addresses = random.sample(known, min(len(known), MAX_SERVERS_ASKED))
        tasks = [asyncio.ensure_future(self._ask(address)) for address in addresses]
        partial: _Ranges = []
        try:
            for answered in asyncio.as_completed(tasks):
                ranges = await answered
                if sum(last - first + 1 for first, last, _ in ranges) == NUM_SLOTS:
                    return ranges
                partial = ranges or partial
        finally:
            await cancel_and_join(tasks)
        if not partial:
            raise SlotsUnknownError("no server of the cluster answers")
        return partial

    async def _ask(self, address: Address) -> _Ranges:
        try:
            answer = (await self.node_at(address).exchange([_ASK_FOR_SLOTS]))[0]
        except CLIENT_ERRORS:
            return []
        return [] if isinstance(answer, ResponseError) else _ranges_of(answer, address[0])

    async def _forget_others(self) -> None:
        """Close idle servers without slots. Replicas stay known only while they are asked for
        slots.
        """
        kept = {address for _, _, address in self._ranges} | self._seeds
        for address in [
            address for address, node in self._nodes.items() if address not in kept and node.is_idle
        ]:
            await self._nodes.pop(address).close()


class RedisClusterClient(RedisClient):
    """Sends each command to the server that has its slot, and follows slots that move.

    Args:
        servers: The map of slots; belongs to this object.
        where: Name of this Redis, for display.
    """

    def __init__(self, servers: ClusterMap, where: str) -> None:
        self.servers = servers
        self.where = where

    @override
    async def close(self) -> None:
        await self.servers.close()

    @override
    async def ping(self, key: str) -> None:
        await self.many([RedisCommand(key, ("GET", key))])
        await self.each_master([_PING])

    async def each_master(self, commands: Sequence[RedisCommand]) -> list[list[Any]]:
        """Send commands to every master, and return its replies as `RedisNode.exchange` does.

        Raises:
            RedisError, OSError: One did not answer.
        """
        if self.servers.is_stale:
            await self.servers.refresh()
        return await asyncio.gather(*(node.exchange(commands) for node in self.servers.masters()))

    @override
    async def many(self, commands: Sequence[RedisCommand]) -> list[Any]:
        answers: list[Any] = [None] * len(commands)
        waiting = list(range(len(commands)))
        for _ in range(MAX_REDIRECTIONS):
            await self._send(commands, waiting, answers)
            for place in waiting:
                await self._follow(commands[place], place, answers)
            waiting = [place for place in waiting if isinstance(answers[place], MovedError)]
            if not waiting:
                break
        try:
            return checked(commands, answers)
        except ResponseError:
            self.servers.is_stale = True
            raise

    async def _send(
        self, commands: Sequence[RedisCommand], places: Sequence[int], answers: list[Any]
    ) -> None:
        if self.servers.is_stale:
            await self.servers.refresh()
        by_node: defaultdict[RedisNode, list[int]] = defaultdict(list)
        for place in places:
            by_node[self.servers.node_of(slot_of(commands[place].key))].append(place)
        calls = [
            node.exchange([commands[place] for place in inside]) for node, inside in by_node.items()
        ]
        try:
            found = await asyncio.gather(*calls, return_exceptions=True)
        except asyncio.CancelledError:
            # The caller's time is over: a server that has not answered may have lost its slots.
            self.servers.is_stale = True
            raise
        failures = [part for part in found if isinstance(part, BaseException)]
        if failures:
            self.servers.is_stale = True
            # An unknown outcome says more than a refusal.
            raise min(failures, key=lambda failure: isinstance(failure, ResponseError))
        for inside, part in zip(by_node.values(), found, strict=True):
            assert isinstance(part, list)
            for place, answer in zip(inside, part, strict=True):
                answers[place] = answer

    async def _follow(self, command: RedisCommand, place: int, answers: list[Any]) -> None:
        """Ask the server that is importing a slot; have the map refreshed if a slot has moved."""
        answer = answers[place]
        if isinstance(answer, MovedError):
            self.servers.is_stale = True
        elif isinstance(answer, AskError):
            answers[place] = await self.servers.node_at((answer.host, answer.port)).ask(command)
        elif isinstance(answer, TryAgainError):
            node = self.servers.node_of(slot_of(command.key))
            answers[place] = (await node.exchange([command]))[0]


def _ranges_of(answer: Any, asked_host: str) -> _Ranges:
    """Parse `CLUSTER SLOTS`: [first, last, [host, port, ...], ...]; a server that does not know its
    own name leaves it empty.
    """
    ranges = []
    for first, last, (host, port, *_), *_ in answer:
        name = host.decode() if host else ""
        ranges.append(
            (int(first), int(last), (name if name not in ("", "?") else asked_host, int(port)))
        )
    return sorted(ranges)


def create_redis_client(
    access: RedisAccess, timeout_s: float, max_connections: int = MAX_CONNECTIONS
) -> RedisClient:
    """Create the client for a URL, without connecting.

    Args:
        timeout_s: Limit on connecting, and on each question to a sentinel.
        max_connections: Connections to one server; further callers wait.

    Raises:
        ConfigError: The URL or a file for TLS cannot be read.
    """
    if not access.url.is_cluster:
        return RedisClient(RedisNode(*access.server(timeout_s, max_connections)), access.url.where)
    client_of = access.members(timeout_s, max_connections)
    servers = ClusterMap(access.url.addresses, lambda address: RedisNode(client_of(address)))
    return RedisClusterClient(servers, access.url.where)
