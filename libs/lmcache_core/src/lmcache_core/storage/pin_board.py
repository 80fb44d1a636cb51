"""Chunks that an operator pins in hot memory for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lmcache_core.keys import ChunkKey
from lmcache_core.record import Chunk, Miss, MissReason, Result
from lmcache_core.storage.stack import TierStack

MAX_PINNED_CHUNKS = 4096
PINNED_SHARE = 2
"""Pinned chunks may hold one part in this many of the arena."""
BATCH_CHUNKS = 16
PIN_BOUND = "pin_bound"
"""Why an existing chunk is not pinned: too much is pinned already."""


@dataclass(frozen=True, slots=True)
class OperatorPin:
    """A pinned chunk.

    Attributes:
        num_bytes: How much of the arena it takes.
    """

    key: ChunkKey
    num_bytes: int
    expires_in_s: float


@dataclass(slots=True)
class _Pin:
    chunk: Chunk
    ends_at: float


class PinBoard:
    """Holds a reference on every pinned chunk, which protects it from eviction. For use on the
    event loop.

    Args:
        stack: The tiers; a chunk that is not hot is lifted.
        timeout_s: Longest wait for the slower tiers per batch of chunks.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        stack: TierStack,
        arena_bytes: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stack = stack
        self._timeout_s = timeout_s
        self._clock = clock
        self._pins: dict[ChunkKey, _Pin] = {}
        self._is_closed = False
        self.max_bytes = arena_bytes // PINNED_SHARE
        self.num_bytes = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._pins

    def __len__(self) -> int:
        return len(self._pins)

    def pins(self) -> list[OperatorPin]:
        """Return everything that is pinned now."""
        now = self._clock()
        return [
            OperatorPin(key, _size(pin.chunk), max(0.0, pin.ends_at - now))
            for key, pin in self._pins.items()
        ]

    async def pin(self, keys: Sequence[ChunkKey], ttl_s: float) -> dict[ChunkKey, str]:
        """Keep chunks hot for `ttl_s` seconds from now, including those already pinned.

        Returns:
            The reason for each chunk that is not pinned: that of its miss, or `PIN_BOUND`.
        """
        await self.expire()
        reasons: dict[ChunkKey, str] = {}
        for at in range(0, len(keys), BATCH_CHUNKS):
            batch = list(dict.fromkeys(keys[at : at + BATCH_CHUNKS]))
            fresh = [key for key in batch if key not in self._pins]
            is_full = self.num_bytes >= self.max_bytes or len(self._pins) >= MAX_PINNED_CHUNKS
            if fresh and not is_full:
                results = await self._stack.batched_get(fresh, self._timeout_s)
                reasons |= self._take(fresh, results)
            elif fresh:
                reasons |= dict.fromkeys(fresh, PIN_BOUND)
            for key in batch:
                if key in self._pins:
                    self._pins[key].ends_at = self._clock() + ttl_s
        return reasons

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        """Unpin these chunks and return how many were pinned."""
        gone = [self._pins.pop(key) for key in list(keys) if key in self._pins]
        for pin in gone:
            self.num_bytes -= _size(pin.chunk)
            pin.chunk.release()
        return len(gone)

    def unpin_hashes(self, chunk_hashes: frozenset[str] | None) -> int:
        """Unpin the chunks with these hashes (None: all), of any rank and group, and return how
        many were pinned.
        """
        return self.unpin(
            [
                key
                for key in self._pins
                if chunk_hashes is None or key.key.chunk_hash in chunk_hashes
            ]
        )

    async def expire(self) -> None:
        """End pins whose time is over, or whose chunk is no longer served, also if it was stored
        again since; what replaced a lossy chunk is pinned instead of it.
        """
        now = self._clock()
        pins = list(self._pins.items())
        served = self._stack.hot.get_many([key for key, _ in pins], is_access=False)
        for (key, pin), chunk in zip(pins, served, strict=True):
            if chunk is None:
                self.unpin([key])
                continue
            is_other = chunk.memory is not pin.chunk.memory
            num_bytes = self.num_bytes - _size(pin.chunk) + _size(chunk)
            is_better = pin.chunk.lossy and not chunk.lossy and num_bytes <= self.max_bytes
            if pin.ends_at <= now or (is_other and not is_better):
                self.unpin([key])
            elif is_other:
                pin.chunk, chunk = chunk, pin.chunk
                self.num_bytes = num_bytes
            chunk.release()

    def close(self) -> None:
        """Release everything and refuse new pins: the process is shutting down. Idempotent."""
        self._is_closed = True
        self.unpin(list(self._pins))

    def open(self) -> None:
        """Take pins again after `close`; those of before are gone. Idempotent."""
        self._is_closed = False

    def _take(self, keys: Sequence[ChunkKey], results: Sequence[Result]) -> dict[ChunkKey, str]:
        reasons: dict[ChunkKey, str] = {}
        for key, result, is_kept in zip(
            keys, results, self._stack.hot.contains_many(keys), strict=True
        ):
            if isinstance(result, Miss):
                reasons[key] = result.reason.value
                continue
            is_within = (
                self.num_bytes + _size(result) <= self.max_bytes
                and len(self._pins) < MAX_PINNED_CHUNKS
            )
            if key in self._pins or self._is_closed or not is_kept or not is_within:
                result.release()
                if key not in self._pins:
                    reasons[key] = PIN_BOUND if is_kept else MissReason.NO_MEMORY.value
                continue
            self._pins[key] = _Pin(result, 0.0)
            self.num_bytes += _size(result)
        return reasons


def _size(chunk: Chunk) -> int:
    return chunk.memory.metadata.phy_size
