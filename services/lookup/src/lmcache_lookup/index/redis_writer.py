"""Writes batches of events: one script on one server, three steps in a cluster (ADR 10)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lmcache_core.lookup.messages import EventsAck
from lmcache_servicekit.redis_client import CLIENT_ERRORS, Argument, RedisClient, RedisCommand, call
from lmcache_servicekit.redis_cluster import RedisClusterClient
from redis.exceptions import ResponseError
from typing_extensions import override

from lmcache_lookup.index import redis_scripts as scripts
from lmcache_lookup.index.base import ClaimedElsewhereError, EventBatch, IndexEvent
from lmcache_lookup.index.packing import (
    LEASES_KEY,
    NUM_BUCKETS,
    TENANTS_KEY,
    VERSION_KEY,
    bucket_key,
    bucket_of,
    mark_key,
    pack_life,
    pack_number,
)

logger = logging.getLogger(__name__)

MAX_CLOCK_SKEW_MS: Final = 1000
MASTERS_FRESH_S: Final = 0.25

_WHO: Final = (
    RedisCommand(VERSION_KEY, ("INFO", "server")),
    RedisCommand(VERSION_KEY, ("INFO", "replication")),
    RedisCommand(VERSION_KEY, ("CLUSTER", "INFO")),
)


@dataclass(frozen=True, slots=True)
class WriteBounds:
    """Bounds on entries.

    Attributes:
        max_holders: Holders of a chunk.
        max_bucket_chunks: Holders in one bucket; beyond it chunks are dropped for others.
    """

    max_holders: int
    max_bucket_chunks: int


@dataclass(frozen=True, slots=True)
class MastersSeen:
    """The processes that hold a cluster's slots, and the marks of their buckets.

    Attributes:
        epoch: The cluster's epoch; a lower one is an older snapshot.
        run_ids: Sorted, comma-separated; empty without a cluster, or if not all of them answered.
        marks: Marks of all buckets, comma-separated; an emptied bucket has a newer one. Empty if
            `run_ids` is, or if a server refused.
    """

    epoch: int = 0
    run_ids: str = ""
    marks: str = ""


class ServerWriter:
    """Writes to one server: a batch is one script, so that its number and its entries change
    atomically.

    Args:
        client: The server's client, owned by the caller.

    Attributes:
        full: Buckets that have more holders than their bound since a batch.
    """

    def __init__(self, client: RedisClient, bounds: WriteBounds) -> None:
        self._client = client
        self._bounds = bounds
        self.full: set[str] = set()

    async def take(self, field: str, batch: EventBatch) -> EventsAck:
        """Apply the batch to a lease's `field`; see `LookupIndex.apply`.

        Raises:
            ClaimedElsewhereError: Another replica is processing events of this instance.
        """
        keys = {LEASES_KEY: 1, TENANTS_KEY: 2}
        flat: list[Argument] = []
        for event in batch.events:
            bucket = bucket_key(event.tenant, bucket_of(event.chunk_id))
            flat += [keys.setdefault(bucket, len(keys) + 1), *_words_of(batch, event)]
        tenants = _tenants_of(batch)
        head: list[Argument] = [
            field,
            incarnation_text(batch.incarnation),
            batch.first_sequence,
            self._bounds.max_bucket_chunks,
            self._bounds.max_holders,
        ]
        names = list(keys)
        next_sequence, resync, *full = await self._client.run(
            scripts.APPLY, names, [*head, len(tenants), *tenants, *flat]
        )
        self.full.update(names[place - 1] for place in full)
        return EventsAck(next_sequence, bool(resync))

    async def masters_seen(self) -> MastersSeen:
        """Return the processes that hold recent writes; empty for one server, which loses leases
        and entries together.
        """
        return MastersSeen()


class ClusterWriter(ServerWriter):
    """Writes to a cluster: a batch is claimed, written to each bucket, and settled.

    Args:
        client: The cluster's client, owned by the caller.
        timeout_s: Time after which no caller still waits for a batch.
    """

    _client: RedisClusterClient

    def __init__(
        self,
        client: RedisClusterClient,
        bounds: WriteBounds,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(client, bounds)
        self._hold_ms = int(timeout_s * 1000) + MAX_CLOCK_SKEW_MS
        self._look_s = timeout_s / 4
        self._clock = clock
        self._seen = MastersSeen()
        self._seen_at = float("-inf")
        self._looking = asyncio.Lock()
        self._is_refused = False

    @override
    async def take(self, field: str, batch: EventBatch) -> EventsAck:
        claim = secrets.token_hex(8)
        lease: list[Argument] = [field, incarnation_text(batch.incarnation)]
        argv = [
            *lease,
            batch.first_sequence,
            len(batch.events),
            claim,
            self._hold_ms,
            MAX_CLOCK_SKEW_MS,
            *_tenants_of(batch),
        ]
        next_sequence, resync, number, ends_ms = await self._client.run(
            scripts.CLAIM, [LEASES_KEY, TENANTS_KEY], argv
        )
        if number < 0:
            raise ClaimedElsewhereError(
                "events of this instance are being processed by another replica, or were until it"
                " failed; try again"
            )
        if resync or not number:
            return EventsAck(next_sequence, bool(resync))
        try:
            takes = self._takes(batch, next_sequence - batch.first_sequence, number, ends_ms)
            is_full = await self._client.many(list(takes.values()))
            self.full.update(key for key, full in zip(takes, is_full, strict=True) if full)
        except ResponseError:
            # All servers have answered, so nothing of this batch is still underway: the next
            # attempt need not wait for the claim to end.
            await self._client.run(scripts.SETTLE, [LEASES_KEY], [*lease, claim, ""])
            raise
        next_sequence, resync, settled = await self._client.run(
            scripts.SETTLE, [LEASES_KEY], [*lease, claim, batch.first_sequence + len(batch.events)]
        )
        if not settled:
            raise ClaimedElsewhereError(
                "another replica has taken over this instance's events; try again"
            )
        return EventsAck(next_sequence, bool(resync))

    def _takes(
        self, batch: EventBatch, begin: int, number: int, ends_ms: int
    ) -> dict[str, RedisCommand]:
        """Return one script for each bucket, with its events from `begin` on."""
        by_bucket: defaultdict[str, list[Argument]] = defaultdict(list)
        for event in batch.events[begin:]:
            bucket = bucket_key(event.tenant, bucket_of(event.chunk_id))
            by_bucket[bucket] += _words_of(batch, event)
        head: list[Argument] = [
            ends_ms,
            pack_number(number),
            self._bounds.max_holders,
            self._bounds.max_bucket_chunks,
        ]
        return {key: call(scripts.TAKE, [key], [*head, *argv]) for key, argv in by_bucket.items()}

    @override
    async def masters_seen(self) -> MastersSeen:
        """Return a result at most a quarter of a second old."""
        async with self._looking:
            if self._clock() >= self._seen_at + MASTERS_FRESH_S:
                asked_at = self._clock()
                self._seen = await self._look()
                self._seen_at = asked_at
            return self._seen

    async def _look(self) -> MastersSeen:
        """Return an empty result if a master does not answer: the cluster is then incomplete, and a
        later call retries.
        """
        try:
            async with asyncio.timeout(self._look_s):
                found = await self._client.each_master(_WHO)
                marks = await self._marks()
        except CLIENT_ERRORS:
            self._client.servers.is_stale = True
            return MastersSeen()
        self._note_refusals(found)
        run_ids, epochs = [], []
        for answers in found:
            about = _fields_of(answers)
            if about.get("role") != "master" or "run_id" not in about:
                self._client.servers.is_stale = True
                return MastersSeen()
            run_ids.append(about["run_id"])
            epochs.append(int(about.get("cluster_current_epoch", 0)))
        return MastersSeen(max(epochs, default=0), ",".join(sorted(run_ids)), marks)

    async def _marks(self) -> str:
        """Return the marks of all buckets; "" if a server refuses because it is full or considers
        the cluster incomplete.
        """
        keys = [mark_key(bucket) for bucket in range(NUM_BUCKETS)]
        try:
            marks = await self._client.many([RedisCommand(key, ("GET", key)) for key in keys])
            missing = [place for place, mark in enumerate(marks) if mark is None]
            made = await self._client.many(
                [call(scripts.MARK, [keys[place]], []) for place in missing]
            )
        except ResponseError:
            return ""
        for place, mark in zip(missing, made, strict=True):
            marks[place] = mark
        return b",".join(marks).decode()

    def _note_refusals(self, found: Sequence[Sequence[Any]]) -> None:
        """Log changes only. Without these commands everything works until a server loses data."""
        refusals = sorted(
            {str(answer) for who in found for answer in who if isinstance(answer, ResponseError)}
        )
        if bool(refusals) != self._is_refused:
            self._is_refused = bool(refusals)
            if refusals:
                logger.warning(
                    "redis refuses INFO or CLUSTER INFO, entries lost in a failover stay"
                    " unnoticed: error=%s",
                    refusals[0],
                )
            else:
                logger.info("redis answers INFO and CLUSTER INFO again")


def incarnation_text(incarnation: int) -> str:
    """Return an incarnation as scripts compare it: 20 digits."""
    return f"{incarnation:020d}"


def _words_of(batch: EventBatch, event: IndexEvent) -> list[Argument]:
    """Return the three arguments of `merge` for an event."""
    life = pack_life(batch.incarnation, event.size_bytes, event.tier)
    return [event.chunk_id, life, int(event.op == "store")]


def _tenants_of(batch: EventBatch) -> list[str]:
    return sorted({event.tenant for event in batch.events})


def _fields_of(answers: Sequence[Any]) -> dict[str, str]:
    """Return the lines `name:value` of the replies; refusals have none."""
    text = "\n".join(
        answer.decode(errors="replace") for answer in answers if isinstance(answer, bytes)
    )
    return {
        name: value
        for name, _, value in (line.partition(":") for line in text.splitlines())
        if value
    }
