"""Who else holds chunks, as far as lookup knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_core.lookup import Holder, LookupClient


@dataclass(frozen=True)
class Holders:
    """Asks lookup for each of several chunks, which need not be a prefix of anything.

    Attributes:
        lookup: Open for as long as this object is.
        instance: This instance, whose own chunks do not count.
    """

    lookup: LookupClient
    instance: str

    async def of(
        self, chunk_ids: Sequence[bytes], max_questions: int
    ) -> list[Sequence[Holder] | None]:
        """Return the holders of each chunk; None for those about which nothing is known.

        Lookup answers with the longest prefix that is held, so that every chunk that no instance
        holds costs a question: ask about chunks in the order of their prompt.

        Args:
            chunk_ids: 16 bytes each.
            max_questions: After so many, the rest stays unknown.

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
