"""Which server of a Redis Cluster has which slots, as far as we know."""

from __future__ import annotations

import asyncio
import binascii
import bisect
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from lmcache_core.concurrency import cancel_and_join
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import ResponseError

from lmcache_lookup.index.redis_node import CLIENT_ERRORS, Command, RedisNode
from lmcache_lookup.index.redis_urls import Address

NUM_SLOTS: Final = 16_384
MAX_SERVERS_ASKED: Final = 8

_ASK_FOR_SLOTS: Final = Command("", ("CLUSTER", "SLOTS"))

_Ranges = list[tuple[int, int, Address]]
"""First slot, last slot, who has them; in order."""


class SlotsUnknownError(LostConnectionError):
    """No server of the cluster says who has a slot."""


def slot_of(key: str) -> int:
    """The slot of a key that has a hash tag."""
    tag = key[key.index("{") + 1 : key.index("}")]
    return binascii.crc_hqx(tag.encode(), 0) % NUM_SLOTS


class ClusterMap:
    """Asks a few servers at once and believes the first that knows all slots; a server that has not
    got a slot says so when it is used.

    Args:
        seeds: Servers to begin with.
        make_node: Makes the connections to one; they belong to this object.
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
        """The connections to one server."""
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = self._make_node(address)
        return node

    def node_of(self, slot: int) -> RedisNode:
        """Who has a slot.

        Raises:
            SlotsUnknownError: Nobody that we know of.
        """
        place = bisect.bisect_left(self._last_slots, slot)
        if place < len(self._ranges) and self._ranges[place][0] <= slot:
            return self.node_at(self._ranges[place][2])
        self.is_stale = True
        raise SlotsUnknownError(f"nobody has the slot {slot}")

    def masters(self) -> list[RedisNode]:
        """Everyone who has slots."""
        return [
            self.node_at(address) for address in sorted({address for _, _, address in self._ranges})
        ]

    async def refresh(self) -> None:
        """Ask anew, if there is a reason to. Callers that come meanwhile wait for the same answer.

        Raises:
            SlotsUnknownError: Nobody answered.
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
        """Replicas stay known while they are asked for slots: after a failover they know better
        than who is away.
        """
        kept = {address for _, _, address in self._ranges} | self._seeds
        for address in [
            address for address, node in self._nodes.items() if address not in kept and node.is_idle
        ]:
            await self._nodes.pop(address).close()


def _ranges_of(answer: Any, asked_host: str) -> _Ranges:
    """`CLUSTER SLOTS`: [first, last, [host, port, ...], ...]; a server that does not know its
    own name leaves it empty.
    """
    ranges = []
    for first, last, (host, port, *_), *_ in answer:
        name = host.decode() if host else ""
        ranges.append(
            (int(first), int(last), (name if name not in ("", "?") else asked_host, int(port)))
        )
    return sorted(ranges)
