"""The sidecar's arena in this process: mapped and pinned once for all connections of a client."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_core.forks import ProcessMark
from lmcache_core.memory.shared import attach_shared_arena
from lmcache_core.memory.views import tensor_over
from lmcache_core.wire.messages import ArenaInfo

if TYPE_CHECKING:
    import torch


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
        self._is_pinning = self._is_pinned = False

    @property
    def load_view(self) -> memoryview:
        """Return the bytes of the arena to load from: those of the pinned mapping if there is one,
        otherwise they cannot be written.
        """
        return self.arena.store_view if self._is_pinned else self.arena.load_view

    def pin(self, device: torch.device) -> None:
        """Pin the arena for copies to and from a device, as long as this is referenced. If CUDA
        refuses, that is logged and copies are slower. Idempotent; later calls do not wait for the
        first.
        """
        from lmcache_core.memory.tensor import COPY_BOUNDARY_BYTES, pin

        with self._lock:
            is_first, self._is_pinning = not self._is_pinning, True
        if is_first:
            arena = tensor_over(self.arena.store_view, (self.arena.size,), "uint8")
            # In small pieces: the engine's copies wait for some 25 ms for each.
            self._is_pinned = pin(arena, self, device, COPY_BOUNDARY_BYTES)


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

    def _reset(self) -> None:
        self._process = ProcessMark()
        self._lock = threading.Lock()
        self._mapped: weakref.WeakValueDictionary[tuple[str, int, int], ArenaMapping] = (
            weakref.WeakValueDictionary()
        )
