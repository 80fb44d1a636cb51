"""Answers questions about chunks; without the index the answer is "nothing known", never an
error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from lmcache_core.errors import UnavailableError
from lmcache_core.lookup import ContainsAnswer, Holder, LocationsAnswer, RouteAnswer, RouteEntry
from lmcache_core.lookup.messages import MAX_LOCATIONS
from lmcache_core.lookup.runs import HolderRun, PackedLookupAnswer, pack_run

from lmcache_lookup.index import LookupIndex
from lmcache_lookup.metrics import LookupMetrics

logger = logging.getLogger(__name__)

MAX_ROUTED_INSTANCES: Final = 4096


class LookupService:
    """Questions of one tenant at a time.

    Args:
        index: Who holds what.
        metrics: Where answers are counted.
    """

    def __init__(self, index: LookupIndex, metrics: LookupMetrics) -> None:
        self._index = index
        self._metrics = metrics

    async def lookup(
        self, tenant: str, chunk_ids: Sequence[bytes], exclude: Sequence[str]
    ) -> PackedLookupAnswer:
        """The longest prefix of `chunk_ids` that instances outside `exclude` hold, at most 16
        holders for each chunk.
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
        self._metrics.found_chunks.inc(num_prefix)
        return PackedLookupAnswer(num_prefix, runs)

    async def route(
        self, tenant: str, chunk_ids: Sequence[bytes], exclude: Sequence[str]
    ) -> RouteAnswer:
        """For each instance that holds the first chunk, how long a prefix it holds without
        anybody's help.
        """
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
        """For each of `chunk_ids`, wherever it stands, whether an instance outside `exclude`
        holds it.
        """
        found = await self._holders(tenant, chunk_ids)
        if found is None:
            return ContainsAnswer([False] * len(chunk_ids), degraded=True)
        excluded = frozenset(exclude)
        present: list[bool] = []
        for holders, num_chunks in _runs(found):
            present += [bool(_without(holders, excluded))] * num_chunks
        self._metrics.found_chunks.inc(sum(present))
        return ContainsAnswer(present)

    async def locations(self, tenant: str, chunk_id: bytes) -> LocationsAnswer:
        """Everybody who holds one chunk."""
        found = await self._holders(tenant, [chunk_id])
        if found is None:
            return LocationsAnswer([], degraded=True)
        self._metrics.found_chunks.inc(bool(found[0]))
        return LocationsAnswer(list(found[0][:MAX_LOCATIONS]))

    async def _holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]] | None:
        self._metrics.requested_chunks.inc(len(chunk_ids))
        try:
            return await self._index.holders(tenant, chunk_ids)
        except UnavailableError as exc:
            logger.debug("answered without the index: %s", exc)
            self._metrics.degraded_answers.inc()
            return None


def _runs(found: Sequence[list[Holder]]) -> list[tuple[list[Holder], int]]:
    """Lists of holders, and of how many chunks in a row each is: the chunks of a prompt mostly
    have the same holders.
    """
    runs: list[tuple[list[Holder], int]] = []
    begin = 0
    current = found[0] if found else []
    for place, holders in enumerate(found):
        # An index may give the same object to equal chunks: that is quick to see.
        if holders is not current and holders != current:
            runs.append((current, place - begin))
            begin, current = place, holders
    if found:
        runs.append((current, len(found) - begin))
    return runs


def _without(holders: Sequence[Holder], excluded: frozenset[str]) -> list[Holder]:
    return [holder for holder in holders if holder.instance not in excluded]
