"""The index in one Redis server, alone or behind sentinels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from lmcache_lookup.index import redis_scripts as scripts
from lmcache_lookup.index.base import LeaseState
from lmcache_lookup.index.packing import (
    LEASES_KEY,
    TENANTS_KEY,
    VERSION_KEY,
    bucket_key,
    bucket_of,
    pack_life,
)
from lmcache_lookup.index.redis_node import Argument, Command, RedisNode, without_foreign
from lmcache_lookup.index.redis_shards import MastersSeen, RedisShards, Taking


class OneServer(RedisShards):
    """Everything in one place: a batch of events is one script, so that its number and its entries
    change together or not at all.

    Args:
        node: The server, which belongs to this object.
    """

    def __init__(self, node: RedisNode) -> None:
        self._node = node

    async def close(self) -> None:
        """See `RedisShards.close`."""
        await self._node.close()

    async def ping(self) -> None:
        """See `RedisShards.ping`."""
        await self.many([Command(VERSION_KEY, ("PING",))])

    async def many(self, commands: Sequence[Command]) -> list[Any]:
        """See `RedisShards.many`."""
        answers = [
            without_foreign(*pair)
            for pair in zip(commands, await self._node.exchange(commands), strict=True)
        ]
        for answer in answers:
            if isinstance(answer, ResponseError):
                raise answer
        return answers

    async def take(self, taking: Taking) -> LeaseState:
        """See `RedisShards.take`."""
        keys = {LEASES_KEY: 1, TENANTS_KEY: 2}
        flat: list[Argument] = []
        for event in taking.batch.events:
            place = keys.setdefault(
                bucket_key(event.tenant, bucket_of(event.chunk_id)), len(keys) + 1
            )
            flat += [
                place,
                event.chunk_id,
                pack_life(taking.batch.incarnation, event.size_bytes, event.tier),
                int(event.op == "store"),
            ]
        tenants = taking.tenants
        head: list[Argument] = [
            taking.field,
            taking.incarnation,
            taking.batch.first_sequence,
            taking.max_bucket_chunks,
            taking.max_holders,
        ]
        next_sequence, resync = await self.run(
            scripts.APPLY, list(keys), [*head, len(tenants), *tenants, *flat]
        )
        return LeaseState(next_sequence, bool(resync))

    async def masters_seen(self) -> MastersSeen:
        """Nothing to compare: what the server loses of entries it loses of leases, too."""
        return MastersSeen()
