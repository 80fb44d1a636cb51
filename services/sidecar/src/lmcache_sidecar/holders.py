"""Finds other holders of chunks, as far as lookup knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.lookup import Holder, LookupClient


@dataclass(frozen=True)
class Holders:
    """Asks lookup about several chunks, which need not form a prefix.

    Attributes:
        lookup: Must stay open as long as this object.
        instance: This instance, whose own chunks do not count.
    """

    lookup: LookupClient
    instance: str

    async def of(
        self, chunk_ids: Sequence[bytes], max_questions: int
    ) -> list[Sequence[Holder] | None]:
        """Return the holders of each chunk; None for those about which nothing is known.

        Lookup returns the longest prefix with holders, so every chunk without a holder costs a
        question: ask about chunks in the order of their prompt.

        Args:
            chunk_ids: 16 bytes each.
            max_questions: After this many, the rest stays unknown.

        Raises:
            UnavailableError: Lookup did not answer.
        """
        found: list[Sequence[Holder] | None] = []
        for _ in range(max_questions):
            rest = chunk_ids[len(found) :]
            if not rest:
                break
            answer = await self.lookup.lookup(rest, [self.instance])
            if answer.degraded:
                break
            found += answer.holders
            if len(found) < len(chunk_ids):
                found.append(())
        return found + [None] * (len(chunk_ids) - len(found))
