"""A tier whose calls can be read in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Allocate, Chunk, Result
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.wrappers.base import WrapperBackend

HASH_CHARS = 12
"""So much of a chunk's hash finds it in another log line; nothing else of its key is logged."""


@dataclass(slots=True)
class _Outcome:
    num_done: int = 0
    num_bytes: int = 0


class LoggedBackend(WrapperBackend):
    """Writes one debug line a call: how many chunks, bytes and milliseconds, the first chunk's
    hash, and the failure if there was one.

    Args:
        backend: What is wrapped.
        logger: Where the lines go; by default this module's.
    """

    def __init__(self, backend: StorageBackend, logger: logging.Logger | None = None) -> None:
        super().__init__(backend)
        self._logger = logger or logging.getLogger(__name__)

    async def batched_contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """See `StorageBackend.batched_contains`."""
        with self._line("contains", keys) as outcome:
            found = await self._backend.batched_contains(keys)
            outcome.num_done = sum(found)
        return found

    async def batched_get(
        self, keys: Sequence[ChunkKey], allocate: Allocate, timeout_s: float | None = None
    ) -> list[Result]:
        """See `StorageBackend.batched_get`."""
        with self._line("get", keys) as outcome:
            results = await self._backend.batched_get(keys, allocate, timeout_s)
            chunks = [result for result in results if isinstance(result, Chunk)]
            outcome.num_done = len(chunks)
            outcome.num_bytes = sum(chunk.num_bytes for chunk in chunks)
        return results

    async def batched_put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See `StorageBackend.batched_put`."""
        with self._line("put", [chunk.key for chunk in chunks]) as outcome:
            kept = await self._backend.batched_put(chunks)
            outcome.num_done = sum(kept)
            outcome.num_bytes = sum(
                chunk.num_bytes for chunk, is_kept in zip(chunks, kept, strict=True) if is_kept
            )
        return kept

    async def batched_remove(self, keys: Sequence[ChunkKey]) -> int:
        """See `StorageBackend.batched_remove`."""
        with self._line("remove", keys) as outcome:
            outcome.num_done = await self._backend.batched_remove(keys)
        return outcome.num_done

    async def clear(self, tenant: str | None = None) -> int:
        """See `StorageBackend.clear`."""
        with self._line("clear", ()) as outcome:
            outcome.num_done = await self._backend.clear(tenant)
        return outcome.num_done

    @contextmanager
    def _line(self, operation: str, keys: Sequence[ChunkKey]) -> Iterator[_Outcome]:
        outcome = _Outcome()
        first = keys[0].key.chunk_hash[:HASH_CHARS] if keys else "-"
        failure = ""
        began = time.monotonic()
        try:
            yield outcome
        except BaseException as exc:
            failure = f", {type(exc).__name__}"
            raise
        finally:
            self._logger.debug(
                "tier %s %s from %s: %d of %d chunks, %d bytes, %.1f ms%s",
                self.name,
                operation,
                first,
                outcome.num_done,
                len(keys),
                outcome.num_bytes,
                (time.monotonic() - began) * 1e3,
                failure,
            )
