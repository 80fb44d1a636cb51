"""The index in a Redis Cluster: see ADR 10."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

from redis.exceptions import AskError, MovedError, ResponseError, TryAgainError

from lmcache_lookup.index import cluster_scripts as scripts
from lmcache_lookup.index.base import ClaimedElsewhereError, IndexEvent, LeaseState
from lmcache_lookup.index.cluster_map import ClusterMap, slot_of
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
from lmcache_lookup.index.redis_node import (
    CLIENT_ERRORS,
    Argument,
    Command,
    RedisNode,
    call,
    without_foreign,
)
from lmcache_lookup.index.redis_shards import MastersSeen, RedisShards, Taking

logger = logging.getLogger(__name__)

MAX_CLOCK_SKEW_MS: Final = 1000
MAX_REDIRECTIONS: Final = 3
MASTERS_FRESH_S: Final = 0.25

_PING: Final = Command(VERSION_KEY, ("PING",))
_WHO: Final = (
    Command(VERSION_KEY, ("INFO", "server")),
    Command(VERSION_KEY, ("INFO", "replication")),
    Command(VERSION_KEY, ("CLUSTER", "INFO")),
)


class ClusterShards(RedisShards):
    """Sends each command to the server that has its slot, and a batch of events in three steps.

    Args:
        cluster: Who has which slot; belongs to this object.
        write_timeout_s: After this long nobody waits for a batch any more.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        cluster: ClusterMap,
        write_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._map = cluster
        self._hold_ms = int(write_timeout_s * 1000) + MAX_CLOCK_SKEW_MS
        self._patience_s = write_timeout_s / 4
        self._clock = clock
        self._seen = MastersSeen()
        self._seen_at = float("-inf")
        self._looking = asyncio.Lock()
        self._is_refused = False

    async def close(self) -> None:
        """See `RedisShards.close`."""
        await self._map.close()

    async def ping(self) -> None:
        """See `RedisShards.ping`; a cluster that is not whole refuses the read."""
        await self.many([Command(VERSION_KEY, ("GET", VERSION_KEY))])
        await asyncio.gather(*(node.exchange([_PING]) for node in self._map.masters()))

    async def many(self, commands: Sequence[Command]) -> list[Any]:
        """See `RedisShards.many`. A slot that has moved is followed, a few times."""
        answers: list[Any] = [None] * len(commands)
        waiting = list(range(len(commands)))
        for _ in range(MAX_REDIRECTIONS):
            await self._send(commands, waiting, answers)
            await self._follow(commands, waiting, answers)
            waiting = [place for place in waiting if isinstance(answers[place], MovedError)]
            if not waiting:
                break
        answers = [without_foreign(*pair) for pair in zip(commands, answers, strict=True)]
        for answer in answers:
            if isinstance(answer, ResponseError):
                self._map.is_stale = True
                raise answer
        return answers

    async def take(self, taking: Taking) -> LeaseState:
        """See `RedisShards.take`."""
        batch, claim = taking.batch, secrets.token_hex(8)
        beside: list[Argument] = [taking.field, taking.incarnation]
        argv = [
            *beside,
            batch.first_sequence,
            len(batch.events),
            claim,
            self._hold_ms,
            MAX_CLOCK_SKEW_MS,
            *taking.tenants,
        ]
        next_sequence, resync, number, ends_ms = await self.run(
            scripts.CLAIM, [LEASES_KEY, TENANTS_KEY], argv
        )
        if number < 0:
            raise ClaimedElsewhereError(
                "events of this instance are being taken by another replica, or were until it"
                " failed; try again"
            )
        if resync or not number:
            return LeaseState(next_sequence, bool(resync))
        try:
            await self.many(
                _takes(
                    taking, batch.events[next_sequence - batch.first_sequence :], number, ends_ms
                )
            )
        except ResponseError:
            # All were answered, so nothing of this batch is on its way any more: the next try need
            # not wait for the claim's end.
            await self.run(scripts.SETTLE, [LEASES_KEY], [*beside, claim, ""])
            raise
        settle: list[Argument] = [*beside, claim, batch.first_sequence + len(batch.events)]
        next_sequence, resync, settled = await self.run(scripts.SETTLE, [LEASES_KEY], settle)
        if not settled:
            raise ClaimedElsewhereError(
                "another replica has taken over this instance's events; try again"
            )
        return LeaseState(next_sequence, bool(resync))

    async def masters_seen(self) -> MastersSeen:
        """See `RedisShards.masters_seen`; a quarter of a second old at most."""
        async with self._looking:
            if self._clock() >= self._seen_at + MASTERS_FRESH_S:
                asked_at = self._clock()
                self._seen = await self._look()
                self._seen_at = asked_at
            return self._seen

    async def _send(
        self, commands: Sequence[Command], places: Sequence[int], answers: list[Any]
    ) -> None:
        if self._map.is_stale:
            await self._map.refresh()
        by_node: defaultdict[RedisNode, list[int]] = defaultdict(list)
        for place in places:
            by_node[self._map.node_of(slot_of(commands[place].key))].append(place)
        calls = [
            node.exchange([commands[place] for place in inside]) for node, inside in by_node.items()
        ]
        try:
            found = await asyncio.gather(*calls, return_exceptions=True)
        except asyncio.CancelledError:
            # The caller's patience is over: whoever has not answered may not be the one to ask any
            # more.
            self._map.is_stale = True
            raise
        failures = [part for part in found if isinstance(part, BaseException)]
        if failures:
            self._map.is_stale = True
            # One whose outcome is not known says more than one that was refused.
            raise min(failures, key=lambda failure: isinstance(failure, ResponseError))
        for inside, part in zip(by_node.values(), found, strict=True):
            assert isinstance(part, list)
            for place, answer in zip(inside, part, strict=True):
                answers[place] = answer

    async def _follow(
        self, commands: Sequence[Command], places: Sequence[int], answers: list[Any]
    ) -> None:
        """Ask the server that is only just getting a slot; have the map read again where one has
        moved.
        """
        for place in places:
            answer = answers[place]
            if isinstance(answer, MovedError):
                self._map.is_stale = True
            elif isinstance(answer, AskError):
                answers[place] = await self._map.node_at((answer.host, answer.port)).ask(
                    commands[place]
                )
            elif isinstance(answer, TryAgainError):
                answers[place] = (
                    await self._map.node_of(slot_of(commands[place].key)).exchange(
                        [commands[place]]
                    )
                )[0]

    async def _look(self) -> MastersSeen:
        """Nothing, where a master does not answer: then the cluster is not whole, and a later
        look will tell.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                if self._map.is_stale:
                    await self._map.refresh()
                found = await asyncio.gather(*(node.exchange(_WHO) for node in self._map.masters()))
                marks = await self._marks()
        except CLIENT_ERRORS:
            self._map.is_stale = True
            return MastersSeen()
        self._note_refusals(found)
        run_ids, epochs = [], []
        for who in found:
            told = _fields_of(who)
            if told.get("role") != "master" or "run_id" not in told:
                self._map.is_stale = True
                return MastersSeen()
            run_ids.append(told["run_id"])
            epochs.append(int(told.get("cluster_current_epoch", 0)))
        return MastersSeen(max(epochs, default=0), ",".join(sorted(run_ids)), marks)

    async def _marks(self) -> str:
        """Those of all buckets, or nothing where a server refuses, because it is full or thinks
        that the cluster is not whole.
        """
        keys = [mark_key(bucket) for bucket in range(NUM_BUCKETS)]
        try:
            marks = await self.many([Command(key, ("GET", key)) for key in keys])
            missing = [place for place, mark in enumerate(marks) if mark is None]
            made = await self.many([call(scripts.MARK, [keys[place]], []) for place in missing])
        except ResponseError:
            return ""
        for place, mark in zip(missing, made, strict=True):
            marks[place] = mark
        return b",".join(marks).decode()

    def _note_refusals(self, found: Sequence[Sequence[Any]]) -> None:
        """Log changes only. Without these commands all goes well until a server loses something."""
        refusals = {
            str(answer) for who in found for answer in who if isinstance(answer, ResponseError)
        }
        if bool(refusals) != self._is_refused:
            self._is_refused = bool(refusals)
            if refusals:
                logger.warning(
                    "redis refuses INFO or CLUSTER INFO, so entries that a failover loses stay"
                    " unknown: %s",
                    sorted(refusals)[0],
                )
            else:
                logger.info("redis answers INFO and CLUSTER INFO again")


def _takes(
    taking: Taking, events: Sequence[IndexEvent], number: int, ends_ms: int
) -> list[Command]:
    """One script for each bucket."""
    head: list[Argument] = [
        ends_ms,
        pack_number(number),
        taking.max_holders,
        taking.max_bucket_chunks,
    ]
    by_bucket: defaultdict[str, list[Argument]] = defaultdict(list)
    for event in events:
        rest = pack_life(taking.batch.incarnation, event.size_bytes, event.tier)
        by_bucket[bucket_key(event.tenant, bucket_of(event.chunk_id))] += [
            event.chunk_id,
            rest,
            int(event.op == "store"),
        ]
    return [call(scripts.TAKE, [key], [*head, *argv]) for key, argv in by_bucket.items()]


def _fields_of(answers: Sequence[Any]) -> dict[str, str]:
    """The lines `name:value` of texts; refusals have none."""
    text = "\n".join(
        answer.decode(errors="replace") for answer in answers if isinstance(answer, bytes)
    )
    return {
        name: value
        for name, _, value in (line.partition(":") for line in text.splitlines())
        if value
    }
