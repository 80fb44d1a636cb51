"""What the engine needs of storage. Embedded and sidecar mode differ in which object implements
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from lmcache_core.keys import CacheEngineKey, ChunkChain
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record.chunk import Chunk, Staged


class NotLent(StrEnum):
    """Why `ChunkStore.reserve` gives no memory for a chunk."""

    KNOWN = "known"
    """It is in host memory already."""
    NO_ROOM = "no_memory"


class ChunkStore(Protocol):
    """Chunks by key, in memory that this process can read and write. Thread-safe; nothing here
    raises for a missing tier.
    """

    def open(self, on_salt: Callable[[str], None]) -> None:
        """Start. `on_salt` is called, then and later, when the store knows the salt of this
        process's tenant.
        """

    def close(self) -> None:
        """Finish or abandon background writes by deadline and stop. Idempotent."""

    def lookup(self, keys: Sequence[CacheEngineKey], search_range: Sequence[str] | None) -> int:
        """Return how many chunks, from the first, are cached in the tiers named (any tier when
        None).
        """

    def prefetch(self, keys: Sequence[CacheEngineKey]) -> None:
        """Begin to read chunks into host memory; returns at once."""

    def is_worth(self, saving_s: float) -> bool:
        """Return whether a question that can save so much time is worth asking now. Asks nothing.

        False while the store is away, or answers so late that waiting would cost more than a small
        part of that time.
        """

    def stage(
        self,
        ticket: str,
        chains: Sequence[ChunkChain],
        *,
        is_prefix: bool = True,
        recompute_s: float | None = None,
        wait_s: float | None = None,
        saving_s: float = 0.0,
    ) -> Staged | None:
        """Return which of these chunks are in host memory for all ranks, and keep them there; begin
        to read the rest from slower tiers. Waits for no tier.

        A chunk that is promised is not evicted until `unstage`, or until it has not been
        asked about for a while (minutes). Asked again with the same ticket and chains it reports
        progress; other chains under the same ticket are a new question.

        Args:
            ticket: Name of the question, for example the request's id.
            chains: What is asked for.
            is_prefix: Nothing after the first missing chunk of a chain counts or is read.
                Otherwise each chunk counts for itself.
            recompute_s: What recomputing one chunk costs, as far as is known: reading does
                not take longer than that for each chunk.
            wait_s: How long to wait for the answer; asked again with the same ticket and chains,
                wait for the same answer. None: until the store's own deadline.
            saving_s: What the answer can save. With `wait_s`, a store whose answers take too long
                for that is away.

        Returns:
            None when the store is away: nothing is known, and nothing held. Without `tiers` when it
            has not answered yet.
        """

    def unstage(self, tickets: Sequence[str]) -> None:
        """Keep what these tickets were promised no longer; unknown tickets are passed over."""

    def reserve(
        self, keys: Sequence[CacheEngineKey], shapes: Sequence[Sequence[int]], dtype: str
    ) -> list[MemoryObj | NotLent]:
        """Return memory to fill for each chunk that is not in host memory yet. Each object is
        passed to `put` (then `release`) or to `abort`.
        """

    @property
    def needs_digests(self) -> bool:
        """Whether chunks should come to `put` with their digests; otherwise these are made when
        a chunk leaves the process.
        """

    def put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Make filled memory visible under its key. The caller still owns its references."""

    def get(
        self,
        keys: Sequence[CacheEngineKey],
        recompute_s: float | None = None,
        check_later: bool = False,
    ) -> list[Chunk]:
        """Return the longest prefix of these chunks that arrives in time, verified. Each goes to
        `release` when it has been copied.

        What is missing is counted with its reason.

        Args:
            keys: Their names.
            recompute_s: What recomputing one chunk costs, as far as is known: what takes longer
                to load is a miss.
            check_later: Leave chunks whose digest is due `is_unchecked`: the caller compares it
                along with its copy, and calls `reject`.
        """

    def reject(self, chunk: Chunk) -> None:
        """Report that the bytes of a chunk do not have its digest, so that it is not served
        again. Still to be released.
        """

    def forget(self, keys: Sequence[CacheEngineKey]) -> None:
        """Drop chunks that will not be asked for again, where that is cheap; others just age."""

    def release(self, chunks: Sequence[Chunk]) -> bool:
        """Give the references of these chunks back.

        Returns:
            Whether all of them were certainly held until now; False means that what was read from
            them may have been overwritten.
        """

    def abort(self, memories: Sequence[MemoryObj]) -> None:
        """Give reserved memory back unused."""

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the figures by tier."""
