"""The common part of remote tiers: options, figures, and the check of a record read as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from lmcache_core._typing import override
from lmcache_core.errors import RecordError
from lmcache_core.keys import ChunkKey
from lmcache_core.names import STORAGE_TIER
from lmcache_core.record import (
    PREFIX_BYTES,
    Chunk,
    Miss,
    MissReason,
    Result,
    decode_head,
    decode_prefix,
    release_all,
    verify_payload,
)
from lmcache_core.security import ClientTls, ShownToken
from lmcache_core.storage.base import StorageBackend, caller_limit
from lmcache_core.wire.capabilities import ONLY_LOSSLESS, Accepts
from lmcache_core.wire.failures import reaching

DEFAULT_TIMEOUT_S = 2.0

Locate = Callable[[Sequence[ChunkKey]], Awaitable[Sequence[Sequence[str]]]]
"""Returns the names of the servers known to hold each chunk, for example from lookup; may raise
`UnavailableError`.
"""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Options of every remote tier.

    Attributes:
        token: Bearer token, for protocols that have one; a token file is re-read when it changes.
        client_name: Name of this process in the server's logs.
        accepts: Records that the server may send, if the protocol can express it.
        locate: Finds chunks that are not at home, if there are several servers.
        tls: Trusted authorities and client certificate for URLs with TLS; None: the system's
            authorities.
    """

    token: ShownToken = field(default=None, repr=False)
    timeout_s: float = DEFAULT_TIMEOUT_S
    client_name: str = "lmcache"
    accepts: Accepts = ONLY_LOSSLESS
    locate: Locate | None = None
    tls: ClientTls | None = None


class RemoteBackend(StorageBackend):
    """Counts what a remote tier transfers, and bounds its calls. How much a server holds is for the
    server to report.

    Args:
        place: Name of the tier in errors.

    Attributes:
        failures: What the client library raises if the server cannot be reached, in addition to
            `lmcache_core.wire.failures.BROKEN`.
    """

    name = STORAGE_TIER
    failures: ClassVar[tuple[type[Exception], ...]] = ()

    def __init__(self, place: str) -> None:
        self._place = place
        self._stored_chunks = 0
        self._served_chunks = 0
        self._served_bytes = 0
        self._corrupt_chunks = 0
        self._failed_reads = 0

    @override
    async def open(self) -> None:
        """Do nothing: connections are opened on demand."""

    @override
    async def clear(self, tenant: str | None = None) -> int:
        """Remove nothing: a shared server is cleared by its operators."""
        return 0

    @override
    def stats(self) -> dict[str, int]:
        return {
            "num_chunks": 0,
            "used_bytes": 0,
            "capacity_bytes": 0,
            "stored_chunks": self._stored_chunks,
            "served_chunks": self._served_chunks,
            "served_bytes": self._served_bytes,
            "corrupt_chunks": self._corrupt_chunks,
            "failed_reads": self._failed_reads,
        }

    @asynccontextmanager
    async def _mapped(self, limit_s: float | None) -> AsyncIterator[None]:
        """Raise `UnavailableError` for failures and timeouts of a call.

        Args:
            limit_s: Deadline of the call; None if its client enforces one.
        """
        limit = asyncio.timeout(limit_s)

        def why(exc: Exception) -> str:
            if limit.expired():
                return f"no answer within {limit_s} s"
            if isinstance(exc, OSError) and exc.strerror:
                return exc.strerror
            return f"{type(exc).__name__}: {exc}"

        with reaching(self._place, *self.failures, why=why):
            async with limit:
                yield

    async def _collect(
        self,
        num_keys: int,
        timeout_s: float | None,
        read: Callable[[list[Result | None]], Awaitable[None]],
        unanswered: MissReason = MissReason.NEVER_STORED,
    ) -> list[Result]:
        """Return and count what `read` delivers within the caller's time.

        Args:
            timeout_s: The caller's limit; results that have not arrived by then are late.
            read: Fills in results; what it leaves out is missing.
            unanswered: Reason of those misses if time was left.
        """
        results: list[Result | None] = [None] * num_keys
        try:
            # The caller's limit is the outer one, so that it decides if both expire together.
            async with caller_limit(timeout_s) as limit:
                await read(results)
        except BaseException:
            release_all(results)
            raise
        missing = Miss(MissReason.DEADLINE if limit.expired() else unanswered)
        answered = [missing if result is None else result for result in results]
        self._count_got(answered)
        self._failed_reads += answered.count(Miss(MissReason.UNAVAILABLE))
        return answered

    def _count_got(self, results: Sequence[Result]) -> None:
        for result in results:
            if isinstance(result, Chunk):
                self._served_chunks += 1
                self._served_bytes += result.num_bytes
            elif result.reason in (MissReason.CORRUPT, MissReason.IDENTITY):
                self._corrupt_chunks += 1


def is_damaged(record: bytes, key: ChunkKey) -> bool:
    """Return whether a whole record is not that of `key`, or not what its writer sent."""
    view = memoryview(record)
    try:
        prefix = decode_prefix(view[:PREFIX_BYTES])
        header, _ = decode_head(bytes(view[: prefix.head_bytes]), key.key)
        verify_payload(header, view[prefix.head_bytes :])
    except RecordError:
        return True
    return len(view) != prefix.head_bytes + prefix.payload_bytes
