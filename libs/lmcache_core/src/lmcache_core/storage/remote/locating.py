"""Where lookup says that chunks are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lmcache_core.keys import ChunkKey
from lmcache_core.lookup import LookupAnswer

MAX_QUESTIONS = 4
"""Lookup tells the longest prefix that somebody holds: each chunk that nobody holds costs a
question.
"""


class KnowsPrefixes(Protocol):
    """Who is asked: a `LookupClient`."""

    async def lookup(self, chunk_ids: Sequence[bytes]) -> LookupAnswer:
        """Who holds each chunk of the longest prefix. Raises `UnavailableError`."""


class LookupLocator:
    """A `Locate` that asks the lookup service.

    Args:
        lookup: Open for as long as this is used.
    """

    def __init__(self, lookup: KnowsPrefixes) -> None:
        self._lookup = lookup

    async def __call__(self, keys: Sequence[ChunkKey]) -> list[list[str]]:
        """Instances that hold each chunk, none where that is not known.

        Raises:
            UnavailableError: Lookup did not answer.
        """
        chunk_ids = [key.key.chunk_id() for key in keys]
        found: list[list[str]] = []
        for _ in range(MAX_QUESTIONS):
            if len(found) >= len(chunk_ids):
                break
            answer = await self._lookup.lookup(chunk_ids[len(found) :])
            if answer.degraded:
                break
            found += [[holder.instance for holder in holders] for holders in answer.holders]
            if len(found) < len(chunk_ids):
                found.append([])  # the first that nobody holds
        return found + [[] for _ in range(len(chunk_ids) - len(found))]
