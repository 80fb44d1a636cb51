"""What routers believe of an engine's sidecar, against what the sidecar says."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcache_core.engine.guard import DegradingGuard
from lmcache_core.engine.stores import SidecarClient, sidecar_store
from lmcache_core.integrations.vllm.identity import FMT
from lmcache_core.integrations.vllm.kv_events import (
    IN_MEMORY,
    ON_DISK,
    AnnouncedChunk,
    Announcement,
    KVEvents,
)
from lmcache_core.integrations.vllm.options import read_options
from lmcache_core.keys import CHUNK_HASH_BYTES, Lane, each_hash
from lmcache_core.names import DISK_TIER, MEMORY_TIER
from lmcache_core.telemetry import Counters

LOOKS = 10
LOOK_S = 0.5
"""So many looks at the sidecar, so far apart: what routers believe was there at one of them."""


class Router:
    """Follows what an engine names, as routers are told of it.

    Args:
        extra: The connector's configuration.
        groups: Of the engine's KV.
        identity: Of the engine.
        namer: Names the chunks of its requests.
    """

    def __init__(
        self, extra: Mapping[str, Any], groups: Sequence[Any], identity: Any, namer: Any
    ) -> None:
        group = next(group for group in groups if group.window is None)
        model, ranks = identity.metadata.model_name, identity.num_ranks
        self._lanes = [Lane(FMT, model, ranks, rank, group.name) for rank in range(ranks)]
        options = read_options(extra, "cpu").engine
        self._store = sidecar_store(
            options, identity.metadata, Counters(), None, SidecarClient("events", ())
        )
        self._named: dict[bytes, None] = {}
        self._believed: dict[bytes, int] = {}
        self.faults: list[str] = []
        guard = DegradingGuard(Counters(), raised=(Exception,))
        self._events = KVEvents(self._store, self._lanes, _described, self._told, guard)
        namer.on_named = self._follow
        self._store.open(lambda salt: None)
        self._events.open()

    def check(self) -> list[str]:
        """Return what routers are wrong about while the engine names nothing more."""
        seen: dict[bytes, int] = {}
        for _ in range(LOOKS):
            time.sleep(LOOK_S)
            names = list(self._named)
            keys = [lane.key(name) for name in names for lane in self._lanes]
            in_memory, on_disk = (
                self._store.present(keys, tier) for tier in (MEMORY_TIER, DISK_TIER)
            )
            if len(in_memory) < len(keys) or len(on_disk) < len(keys):
                return self.faults  # its sidecar is away, or overloaded
            ranks = len(self._lanes)
            for at, name in enumerate(names):
                memory, disk = (
                    each[at * ranks : (at + 1) * ranks] for each in (in_memory, on_disk)
                )
                # Ranks may have their parts in different places: the slower one counts.
                place = IN_MEMORY if all(memory) else 0
                place |= ON_DISK if all(disk if place else map(max, memory, disk)) else 0
                seen[name] = seen.get(name, 0) | place
        if wrong := sum(bool(place & ~seen.get(name, 0)) for name, place in self._believed.items()):
            self.faults.append(f"error: routers believe {wrong} chunks where they are not")
        return self.faults

    def close(self) -> None:
        self._events.close()
        self._store.close()

    def _follow(self, request: object, hashes: bytes, num_known: int) -> None:
        self._named |= dict.fromkeys(each_hash(hashes))
        self._events.named(hashes, hashes, num_known)

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
