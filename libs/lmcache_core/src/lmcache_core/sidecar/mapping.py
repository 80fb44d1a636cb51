"""The sidecar's arena in this process: mapped and pinned once for all connections of a client."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.forks import ProcessMark
from lmcache_core.memory.populate import BackgroundPopulation
from lmcache_core.memory.shared import attach_shared_arena
from lmcache_core.memory.views import tensor_over
from lmcache_core.wire.messages import ArenaInfo

if TYPE_CHECKING:
    import torch

    from lmcache_core.memory.tensor import HostRegistration

logger = logging.getLogger(__name__)

RETRIES_S = (10.0, 60.0, 300.0, 1800.0)
"""Waits before CUDA is asked again to pin what it has refused."""


class ArenaMapping:
    """One generation of the arena, mapped as long as this is referenced.

    Args:
        info: The sidecar's description; the caller is a client of that generation.

    Attributes:
        arena: The arena; its lock is released, since each connection has its own.

    Raises:
        UnavailableError: See `attach_shared_arena`.
    """

    def __init__(self, info: ArenaInfo) -> None:
        self.arena = attach_shared_arena(Path(info.path), info.num_bytes, info.generation)
        self.arena.lock.release()
        self._lock = threading.Lock()
        self._registration: HostRegistration | None = None
        self._is_pinning = self._has_loaded = False
        self._is_over = threading.Event()
        weakref.finalize(self, self._is_over.set)
        self._populate(self.arena.store_view)

    @property
    def num_pinned_bytes(self) -> int:
        """Return how many bytes, from the first, copies can use directly."""
        return 0 if self._registration is None else self._registration.num_bytes

    def bytes_to_load(self, begin: int, end: int) -> memoryview:
        """Return bytes of the arena to load from: those of the pinned mapping if they are pinned,
        otherwise they cannot be written.
        """
        if end <= self.num_pinned_bytes:
            return self.arena.store_view[begin:end]
        # Page tables take memory, so this second mapping has them only where it is read.
        if not (self._is_pinning or self._has_loaded):
            self._has_loaded = True
            self._populate(self.arena.load_view)
        return self.arena.load_view[begin:end]

    def pin(self, device: torch.device, is_serving: bool = False) -> None:
        """Pin the arena for copies to and from a device, as long as this is referenced. What CUDA
        refuses is logged, and tried again in the background. Idempotent; later calls do not wait
        for the first.

        Args:
            is_serving: Pin in the background, and rest after each piece for as long as it took: the
                engine's calls of CUDA may wait for it.
        """
        from lmcache_core.memory.tensor import COPY_BOUNDARY_BYTES, HostRegistration, can_pin

        with self._lock:
            if self._registration is not None or not can_pin(self.arena.size):
                return
            arena = tensor_over(self.arena.store_view, (self.arena.size,), "uint8")
            self._registration = HostRegistration(arena, self, device, COPY_BOUNDARY_BYTES)
            self._is_pinning = True
        retries_s, rest_s = list(RETRIES_S), 0.0
        while self._is_pinning and not is_serving:
            rest_s = self._pin_next(retries_s)
        if rest_s < math.inf:
            later = threading.Thread(
                target=_pin_later,
                args=(weakref.ref(self), self._is_over, retries_s, rest_s),
                name="lmcache-pin",
                daemon=True,
            )
            try:
                later.start()
            except RuntimeError as exc:
                logger.warning("cannot pin the arena, copies are slower: error=%s", exc)

    def _pin_next(self, retries_s: list[float]) -> float:
        """Pin the next piece, and return how long to wait before the one after it; infinity if that
        was the last attempt.
        """
        registration = self._registration
        assert registration is not None
        began = time.monotonic()
        error = registration.pin_next()
        self._is_pinning = error == 0 and not registration.is_whole
        if self._is_pinning:
            return time.monotonic() - began
        if error == 0:
            logger.info("arena pinned: size_bytes=%d", registration.num_bytes)
            return math.inf
        retry_s = retries_s.pop(0) if retries_s else math.inf
        registration.log_refusal(
            error,
            f" retry_in_s={retry_s:g} volume={self.arena.path.parent}; memory (tmpfs, hugetlbfs)"
            " can be pinned, files on a disk cannot since Linux 6.5",
        )
        return retry_s

    def _populate(self, view: memoryview) -> None:
        weakref.finalize(self, BackgroundPopulation(view).stop)


def _pin_later(
    found: weakref.ref[ArenaMapping],
    is_over: threading.Event,
    retries_s: list[float],
    rest_s: float,
) -> None:
    while rest_s < math.inf and not is_over.wait(rest_s):
        mapping = found()
        rest_s = math.inf if mapping is None else mapping._pin_next(retries_s)
        del mapping  # kept for one piece at a time: nothing else unpins meanwhile


class ArenaMappings:
    """The arenas that the connections of a client have mapped. Thread-safe; a forked child has
    none.
    """

    def __init__(self) -> None:
        self._reset()

    def of(self, info: ArenaInfo) -> ArenaMapping:
        """Return the mapping of an arena, which the caller keeps.

        Raises:
            UnavailableError: See `ArenaMapping`.
        """
        if not self._process.is_here:
            self._reset()
        key = info.path, info.num_bytes, info.generation
        with self._lock:
            found = self._mapped.get(key)
            if found is None:
                found = self._mapped[key] = ArenaMapping(info)
            return found

    @property
    def num_pinned_bytes(self) -> int:
        """Return how many bytes of all of them are pinned."""
        return sum(mapping.num_pinned_bytes for mapping in self._mapped.values())

    def _reset(self) -> None:
        self._process = ProcessMark()
        self._lock = threading.Lock()
        self._mapped: weakref.WeakValueDictionary[tuple[str, int, int], ArenaMapping] = (
            weakref.WeakValueDictionary()
        )
