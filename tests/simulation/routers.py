"""What routers believe of an engine's sidecar, against what the sidecar says."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.engine.stores import SidecarClient, sidecar_store
from lmcache_core.integrations.vllm.identity import FMT
from lmcache_core.integrations.vllm.kv_events import AnnouncedChunk, Announcement, KVEvents
from lmcache_core.integrations.vllm.options import read_options
from lmcache_core.integrations.vllm.scheduler import SchedulerSide
from lmcache_core.keys import CHUNK_HASH_BYTES, Lane
from lmcache_core.telemetry import Counters

LOOKS = 10
LOOK_S = 0.5
"""So many looks at the sidecar, so far apart: what routers believe was there at one of them."""


class Router:
    """Follows what an engine names, as routers are told of it.

    Args:
        extra: The connector's configuration.
        side: The connector's side of the scheduler.
    """

    def __init__(self, extra: Mapping[str, Any], side: SchedulerSide) -> None:
        namer = side._namer
        identity = namer._identity
        group = next(group for group in side._groups if group.window is None)
        model, ranks = identity.metadata.model_name, identity.num_ranks
        lanes = [Lane(FMT, model, ranks, rank, group.name) for rank in range(ranks)]
        options = read_options(extra, "cpu").engine
        self._store = sidecar_store(
            options, identity.metadata, Counters(), None, SidecarClient("events", ())
        )
        self._believed: dict[bytes, int] = {}
        self.faults: list[str] = []
        guard = DegradingGuard(Counters(), raised=(Exception,))
        self._events = KVEvents(self._store, lanes, _described, self._told, guard)
        namer.on_named = lambda _, hashes, known: self._events.named(hashes, hashes, known)
        self._store.open(lambda salt: None)
        self._events.open()

    def check(self) -> list[str]:
        """Return what routers are wrong about while the engine names nothing more."""
        seen: dict[bytes, int] = {}
        for _ in range(LOOKS):
            time.sleep(LOOK_S)
            names = list(self._events._chunks)
            places = self._events._places(names)
            if places is None:
                return self.faults  # its sidecar is away, or overloaded
            for name, place in zip(names, places, strict=True):
                seen[name] = seen.get(name, 0) | place
        if wrong := sum(bool(place & ~seen.get(name, 0)) for name, place in self._believed.items()):
            self.faults.append(f"error: routers believe {wrong} chunks where they are not")
        return self.faults

    def close(self) -> None:
        self._events.close()
        self._store.close()

    def _told(self, announcements: Sequence[Announcement]) -> None:
        for told in announcements:
            (name,) = told.chunk.block_hashes
            before = self._believed.pop(name, 0)
            if before & told.place and told.is_here:
                self.faults.append("error: a router that counts references has two of a chunk")
            if after := before | told.place if told.is_here else before & ~told.place:
                self._believed[name] = after


def _described(hashes: bytes, first: int, last: int) -> Iterator[AnnouncedChunk]:
    for at in range(first * CHUNK_HASH_BYTES, last * CHUNK_HASH_BYTES, CHUNK_HASH_BYTES):
        yield AnnouncedChunk((hashes[at : at + CHUNK_HASH_BYTES],), None, array("I"), None)
