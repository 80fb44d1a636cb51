"""The running storage: its parts, as routes and probes see them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_core.keys import ChunkKey
from lmcache_core.lookup import InstanceReporter
from lmcache_core.p2p import PeerRegistration
from lmcache_core.storage import DiskBackend, LocalCPUBackend
from lmcache_core.storage.pin_board import PinBoard
from lmcache_core.storage.stack import TierStack
from lmcache_core.wire import LmServer

from lmcache_storage.chunks.service import ChunkDoor
from lmcache_storage.handover.drain import Drain
from lmcache_storage.handover.neighbours import Neighbours

if TYPE_CHECKING:
    from lmcache_storage.s3.backend import S3Backend


@dataclass(slots=True)
class StorageParts:
    """Everything that the lifespan has opened.

    Attributes:
        instance: Instance id.
        advertise_url: Where others reach lm:// of this instance.
        stack: All tiers.
        tiers: The same, by what they are.
        chunks: What REST serves.
        lm_server: What lm:// serves.
        reporter: Reports to lookup; None without a lookup_url.
        registration: Lease at the broker; None without a broker_url.
        pins: What operators keep in memory.
        drain: The way to this instance's end.
        neighbours: The other servers; None where none are configured.
        bucket: The further store; None where none is configured.
    """

    instance: str
    advertise_url: str
    stack: TierStack
    tiers: tuple[LocalCPUBackend | DiskBackend, ...]
    chunks: ChunkDoor
    lm_server: LmServer
    reporter: InstanceReporter | None
    registration: PeerRegistration | None
    pins: PinBoard
    drain: Drain
    neighbours: Neighbours | None
    bucket: S3Backend | None
    _listing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_settled(self) -> bool:
        """Whether everything stored has been written below and reported to lookup."""
        return not self.stack.is_writing and (self.reporter is None or self.reporter.synced)

    async def page(
        self, tenant: str, begin: int, end: int
    ) -> tuple[list[tuple[ChunkKey, int, list[str]]], int]:
        """Part of what `holdings` returns, and how many there are.

        Listing takes as long as there are chunks, so it is done in a thread, and by one at a time:
        others need these threads, too.
        """
        async with self._listing:
            held = await asyncio.to_thread(self.holdings, tenant)
        return held[begin:end], len(held)

    def holdings(self, tenant: str) -> list[tuple[ChunkKey, int, list[str]]]:
        """Key, size in bytes and tiers of every chunk of a tenant, in a stable order."""
        found: dict[ChunkKey, tuple[int, list[str]]] = {}
        for tier in self.tiers:
            for key, num_bytes in tier.held():
                if key.tenant == tenant:
                    found.setdefault(key, (num_bytes, []))[1].append(tier.name)
        ordered = sorted(found.items(), key=lambda item: item[0].key.canonical())
        return [(key, num_bytes, names) for key, (num_bytes, names) in ordered]
