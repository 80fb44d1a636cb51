"""The engine's interface to storage. Embedded and sidecar mode differ in the object that implements
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from lmcache_core.keys import CacheEngineKey, ChunkChain
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record.chunk import Chunk, Staged

if TYPE_CHECKING:
    import torch


class NotLent(StrEnum):
    """Why `ChunkStore.reserve` returns no memory for a chunk."""

    KNOWN = "known"
    """It is already in host memory."""
    NO_ROOM = "no_memory"


class ChunkStore(Protocol):
    """Chunks by key, in memory that this process can read and write. Thread-safe; no method raises
    for a missing tier.
    """

    def open(self, on_salt: Callable[[str], None]) -> None:
        """Start. `on_salt` is called when the salt of this process's tenant becomes known, and
        whenever it changes.
        """

    def close(self) -> None:
        """Stop, after finishing background writes up to a deadline and abandoning the rest.
        Idempotent.
        """

    def lookup(self, keys: Sequence[CacheEngineKey], search_range: Sequence[str] | None) -> int:
        """Return how many chunks, from the first, are cached in the named tiers (None: any
        tier).
        """

    def prefetch(self, keys: Sequence[CacheEngineKey]) -> None:
        """Begin to read chunks into host memory; returns immediately."""

    def pin_memory(self, device: torch.device) -> None:
        """Pin the host memory of chunks for copies to and from a device, unless it is pinned. May
        take a second for 10 GiB.
        """
        return

    def is_worth(self, saving_s: float) -> bool:
        """Return whether a question that can save `saving_s` is worth asking now, without asking
        it.

        False while the store is unavailable, or answers so late that waiting would cost more than a
        small part of that time.
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
        source: str | None = None,
    ) -> Staged | None:
        """Return which of these chunks are in host memory for all ranks, and keep them there; begin
        to read the rest from slower tiers. Waits for no tier.

        A promised chunk is not evicted until `unstage`, or until it has not been asked about for
        some minutes. Called again with the same ticket and chains, it reports progress; other
        chains under the same ticket are a new question.

        Args:
            ticket: Name of the question, for example the request's id.
            is_prefix: Ignore everything after the first missing chunk of a chain. Otherwise each
                chunk counts individually.
            recompute_s: Cost of recomputing one chunk, if known: reading takes no longer than that
                for each chunk.
            wait_s: How long to wait for the answer; a repeated call waits for the same answer.
                None: until the store's own deadline.
            saving_s: What the answer can save. With `wait_s`, a store that answers too late for
                that counts as unavailable.
            source: Another engine has just computed these chunks, and may still be storing them:
                missing ones are waited for, for a moment. The id or host of the instance that will
                have them; "": any. None: nothing is known to be on its way.

        Returns:
            None if the store is unavailable: nothing is known, and nothing held. Without `tiers` if
                it has not answered yet.
        """

    def unstage(self, tickets: Sequence[str]) -> None:
        """Release what these tickets were promised; unknown tickets are ignored."""

    def reserve(
        self, keys: Sequence[CacheEngineKey], shapes: Sequence[Sequence[int]], dtype: str
    ) -> list[MemoryObj | NotLent]:
        """Return memory to fill for each chunk that is not in host memory yet. Each object must be
        passed to `put` (then `release`) or to `abort`.
        """

    @property
    def instance(self) -> str:
        """Id under which peers find what is stored here; "" if they cannot."""
        return ""

    @property
    def needs_digests(self) -> bool:
        """Whether chunks should come to `put` with their digests; otherwise digests are computed
        when a chunk leaves the process.
        """

    def put(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Make filled memory visible under its key. The caller still owns its references."""

    def get(
        self,
        keys: Sequence[CacheEngineKey],
        recompute_s: float | None = None,
        check_later: bool = False,
    ) -> list[Chunk]:
        """Return the longest prefix of these chunks that arrives in time, verified. Pass each to
        `release` after copying it.

        Missing chunks are counted with their reasons.

        Args:
            recompute_s: Cost of recomputing one chunk, if known: a chunk that takes longer to load
                is a miss.
            check_later: Leave chunks whose digest must be checked `is_unchecked`: the caller checks
                it while copying, and calls `reject` if it differs.
        """

    def reject(self, chunk: Chunk) -> None:
        """Report that the bytes of a chunk do not match its digest, so that it is not served again.
        It must still be released.
        """

    def forget(self, keys: Sequence[CacheEngineKey]) -> None:
        """Drop chunks that will not be requested again, if that is cheap; otherwise let them
        age.
        """

    def holds(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether all of these chunks have certainly been held until now."""
        return True

    def release(self, chunks: Sequence[Chunk]) -> bool:
        """Release the references of these chunks.

        Returns:
            Whether all of them were certainly held until now; False means that what was read from
                them may have been overwritten.
        """

    def abort(self, memories: Sequence[MemoryObj]) -> None:
        """Release reserved memory unused."""

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the figures by tier."""
