"""Answers questions about prefixes; without the index the answer is "nothing known", never an error."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from lmcache_core.errors import UnavailableError
from lmcache_core.lookup import MAX_HOLDERS_PER_CHUNK, Holder, LookupAnswer, RouteAnswer, RouteEntry

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

    async def lookup(self, tenant: str, chunk_ids: Sequence[bytes], exclude: Sequence[str]) -> LookupAnswer:
        """The longest prefix of `chunk_ids` that instances outside `exclude` hold, at most 16 holders for each chunk."""
        found = await self._holders(tenant, chunk_ids)
        if found is None:
            return LookupAnswer(0, [], degraded=True)
        excluded = frozenset(exclude)
        prefix: list[list[Holder]] = []
        for holders in found:
            others = [holder for holder in holders if holder.instance not in excluded]
            if not others:
                break
            prefix.append(others[:MAX_HOLDERS_PER_CHUNK])
        self._metrics.found_chunks.inc(len(prefix))
        return LookupAnswer(len(prefix), prefix)

    async def route(self, tenant: str, chunk_ids: Sequence[bytes]) -> RouteAnswer:
        """For each instance that holds the first chunk, how long a prefix it holds without anybody's help."""
        found = await self._holders(tenant, chunk_ids)
        if found is None:
            return RouteAnswer([], degraded=True)
        lengths: dict[str, int] = {}
        running: set[str] = set()
        for place, holders in enumerate(found):
            here = {holder.instance for holder in holders}
            running = here if place == 0 else running & here
            if not running:
                break
            lengths.update(dict.fromkeys(running, place + 1))
        longest_first = sorted(lengths.items(), key=lambda item: (-item[1], item[0]))
        return RouteAnswer([RouteEntry(instance, length) for instance, length in longest_first[:MAX_ROUTED_INSTANCES]])

    async def _holders(self, tenant: str, chunk_ids: Sequence[bytes]) -> list[list[Holder]] | None:
        self._metrics.requested_chunks.inc(len(chunk_ids))
        try:
            return await self._index.holders(tenant, chunk_ids)
        except UnavailableError as exc:
            logger.debug("lookup answered without the index: %s", exc)
            self._metrics.degraded_answers.inc()
            return None
