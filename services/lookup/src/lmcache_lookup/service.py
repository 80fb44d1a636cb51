"""Answers questions from the index, and applies events to it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lmcache_core.errors import UnavailableError
from lmcache_core.lookup.messages import (
    MAX_LOCATIONS,
    ContainsAnswer,
    EventsAck,
    EventsRequest,
    Holder,
    HolderRun,
    LocationsAnswer,
    PackedLookupAnswer,
    RouteAnswer,
    RouteEntry,
    StatsAnswer,
    pack_run,
)
from lmcache_core.names import KNOWN_TIERS
from lmcache_core.security import Principal, owner_of, speaks_for_all_tenants
from lmcache_servicekit.bodies import invalid
from lmcache_servicekit.errors import PermissionDeniedError

from lmcache_lookup.index import EventBatch, IndexEvent, LookupIndex
from lmcache_lookup.metrics import LookupMetrics
from lmcache_lookup.settings import LookupSettings

logger = logging.getLogger(__name__)

MAX_ROUTED_INSTANCES: Final = 4096


@dataclass(frozen=True, slots=True)
class LookupService:
    """Answers questions of one tenant at a time, and applies events of one instance at a time."""

    index: LookupIndex
    metrics: LookupMetrics
    settings: LookupSettings

    async def lookup(
        self, tenant: str, chunk_ids: Sequence[bytes], exclude: Sequence[str]
    ) -> PackedLookupAnswer:
        """Return the longest prefix of `chunk_ids` that instances outside `exclude` hold, with at
        most 16 holders for each chunk.
        """
        found = await self._holders(tenant, chunk_ids)
        if found is None:
            return PackedLookupAnswer(0, [], degraded=True)
        excluded = frozenset(exclude)
        runs: list[HolderRun] = []
        num_prefix = 0
        for holders, num_chunks in _runs(found):
            others = _without(holders, excluded)
            if not others:
                break
            runs.append(pack_run(num_chunks, others))
            num_prefix += num_chunks
        self.metrics.found_chunks.inc(num_prefix)
        return PackedLookupAnswer(num_prefix, runs)

    async def route(
        self, tenant: str, chunk_ids: Sequence[bytes], exclude: Sequence[str]
    ) -> RouteAnswer:
        """Return how long a prefix each instance that has the first chunk holds by itself."""
        found = await self._holders(tenant, chunk_ids)
        if found is None:
            return RouteAnswer([], degraded=True)
        lengths: dict[str, int] = {}
        running: set[str] | None = None
        place = 0
        for holders, num_chunks in _runs(found):
            here = {holder.instance for holder in holders}
            running = here.difference(exclude) if running is None else running & here
            if not running:
                break
            place += num_chunks
            lengths.update(dict.fromkeys(running, place))
        longest_first = sorted(lengths.items(), key=lambda item: (-item[1], item[0]))
        return RouteAnswer(
            [
                RouteEntry(instance, length)
                for instance, length in longest_first[:MAX_ROUTED_INSTANCES]
            ]
        )

    async def contains(
        self, tenant: str, chunk_ids: Sequence[bytes], exclude: Sequence[str]
    ) -> ContainsAnswer:
        """Return for each of `chunk_ids` whether an instance outside `exclude` holds it."""
        found = await self._holders(tenant, chunk_ids)
        if found is None:
            return ContainsAnswer([False] * len(chunk_ids), degraded=True)
        excluded = frozenset(exclude)
        present: list[bool] = []
        for holders, num_chunks in _runs(found):
            present += [bool(_without(holders, excluded))] * num_chunks
        self.metrics.found_chunks.inc(sum(present))
        return ContainsAnswer(present)

    async def locations(self, tenant: str, chunk_id: bytes) -> LocationsAnswer:
        """Return all holders of one chunk."""
        found = await self._holders(tenant, [chunk_id])
        if found is None:
            return LocationsAnswer([], degraded=True)
        self.metrics.found_chunks.inc(bool(found[0]))
        return LocationsAnswer(list(found[0][:MAX_LOCATIONS]))

    async def take(self, caller: Principal, body: EventsRequest) -> EventsAck:
        """Apply a batch of events.

        Raises:
            RequestValidationError: The name of a tier is unknown.
            PermissionDeniedError: An event concerns another tenant, and the caller's role covers
                only its own.
            UnavailableError: The index is unavailable; sending the batch again is safe.
        """
        # Each name of a tier would take room for each chunk.
        if not KNOWN_TIERS.issuperset(event.tier for event in body.events):
            raise invalid(
                f"a tier's name must be one of {', '.join(sorted(KNOWN_TIERS))}", "events"
            )
        events = [
            IndexEvent(
                event.op,
                event.tenant or caller.tenant,
                event.chunk_id,
                event.tier,
                event.size_bytes,
            )
            for event in body.events
        ]
        if not speaks_for_all_tenants(caller.role) and any(
            event.tenant != caller.tenant for event in events
        ):
            raise PermissionDeniedError(
                "reporting for another tenant needs a token with the role storage or admin"
            )
        state = await self.index.apply(
            owner_of(caller),
            EventBatch(body.instance, body.incarnation, body.first_sequence, events),
        )
        dropped, self.index.num_dropped = self.index.num_dropped, 0
        self.metrics.dropped_chunks.inc(dropped)
        self.metrics.resyncs.inc(state.resync)
        self.metrics.events.inc(0 if state.resync else len(events))
        return state

    async def stats(self, tenant: str) -> StatsAnswer:
        """Return figures of one tenant; an unavailable index is part of the answer."""
        try:
            return await self.index.stats(tenant)
        except UnavailableError:
            return StatsAnswer(self.index.name, True, None, None)

    async def _holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]] | None:
        self.metrics.requested_chunks.inc(len(chunk_ids))
        try:
            return await self.index.holders(tenant, chunk_ids)
        except UnavailableError as exc:
            logger.debug("index unavailable, answered without it: error=%s", exc)
            self.metrics.degraded_answers.inc()
            return None


def _runs(found: Sequence[list[Holder]]) -> list[tuple[list[Holder], int]]:
    """Return each list of holders with the number of consecutive chunks that have it: the chunks of
    a prompt mostly have the same holders.
    """
    runs: list[tuple[list[Holder], int]] = []
    begin = 0
    current = found[0] if found else []
    for place, holders in enumerate(found):
        # An index may return one object for equal chunks, which is fast to compare.
        if holders is not current and holders != current:
            runs.append((current, place - begin))
            begin, current = place, holders
    if found:
        runs.append((current, len(found) - begin))
    return runs


def _without(holders: Sequence[Holder], excluded: frozenset[str]) -> list[Holder]:
    return [holder for holder in holders if holder.instance not in excluded]


def tenant_for(caller: Principal, asked: str | None) -> str:
    """Return the tenant that a call concerns.

    Raises:
        PermissionDeniedError: It is not the caller's, and the caller's token lacks the role
            `admin`.
    """
    if asked is None or asked == caller.tenant:
        return caller.tenant
    if caller.role != "admin":
        raise PermissionDeniedError("asking about another tenant needs a token with the role admin")
    return asked
