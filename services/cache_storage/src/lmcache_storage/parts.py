"""The running storage: its parts, as routes and probes see them."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.keys import ChunkKey
from lmcache_core.lookup import InstanceReporter
from lmcache_core.p2p import PeerRegistration
from lmcache_core.storage import LocalCPUBackend, LocalDiskBackend
from lmcache_core.storage.stack import TierStack
from lmcache_core.wire import LmServer

from lmcache_storage.chunks.service import ChunkDoor


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
        drain_timeout_s: How long a drain waits for pending writes.
    """

    instance: str
    advertise_url: str
    stack: TierStack
    tiers: tuple[LocalCPUBackend | LocalDiskBackend, ...]
    chunks: ChunkDoor
    lm_server: LmServer
    reporter: InstanceReporter | None
    registration: PeerRegistration | None
    drain_timeout_s: float

    @property
    def is_settled(self) -> bool:
        """Whether everything stored has been written below and reported to lookup."""
        return self.stack.num_pending_bytes == 0 and (self.reporter is None or self.reporter.synced)

    async def drain(self) -> bool:
        """Take no new chunks, ask for no new pulls, wait for pending writes; False when they took too long."""
        self.chunks.gate.close()
        if self.registration is not None:
            self.registration.drain()
        return await self.stack.drain(self.drain_timeout_s)

    def holdings(self, tenant: str) -> list[tuple[ChunkKey, int, list[str]]]:
        """Key, size in bytes and tiers of every chunk of a tenant, in a stable order."""
        found: dict[ChunkKey, tuple[int, list[str]]] = {}
        for tier in self.tiers:
            for key, num_bytes in tier.held():
                if key.tenant == tenant:
                    found.setdefault(key, (num_bytes, []))[1].append(tier.name)
        ordered = sorted(found.items(), key=lambda item: item[0].key.canonical())
        return [(key, num_bytes, names) for key, (num_bytes, names) in ordered]
