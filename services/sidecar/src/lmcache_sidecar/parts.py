"""The running sidecar: its parts, as routes and probes see them."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.lookup import InstanceReporter
from lmcache_core.memory import SharedArena
from lmcache_core.p2p import PeerRegistration
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.local_store import LOCAL_TIERS
from lmcache_core.storage.stack import TierStack

from lmcache_sidecar.socket import SocketServer


@dataclass(slots=True)
class SidecarParts:
    """Everything that the lifespan has opened.

    Attributes:
        instance: Instance id.
        distributed_url: Where peers reach this sidecar.
        arena: The shared memory.
        stack: All tiers.
        local_tiers: Those of them that keep chunks in this pod.
        socket_server: Clients of the pod.
        reporter: Reports to lookup; None without a lookup_url.
        registration: Lease at the broker; None without a broker_url.
        drain_timeout_s: How long a drain waits for pending writes.
        is_draining: No new stores.
    """

    instance: str
    distributed_url: str
    arena: SharedArena
    stack: TierStack
    local_tiers: tuple[StorageBackend, ...]
    socket_server: SocketServer
    reporter: InstanceReporter | None
    registration: PeerRegistration | None
    drain_timeout_s: float
    is_draining: bool = False

    @property
    def is_registered(self) -> bool:
        """Whether lookup and broker (where configured) know this sidecar now."""
        known = self.reporter is None or self.reporter.registered
        return known and (self.registration is None or self.registration.registered)

    @property
    def is_settled(self) -> bool:
        """Whether everything stored has been written below and reported to lookup."""
        return self.stack.num_pending_bytes == 0 and (self.reporter is None or self.reporter.synced)

    async def clear(self) -> int:
        """Forget every chunk of the local tiers; the number in the one that held most."""
        return await self.stack.clear(search_range=LOCAL_TIERS)

    async def drain(self) -> bool:
        """Take no new stores, ask for no new pulls, wait for pending writes; False when they took too long."""
        self.is_draining = True
        self.socket_server.refuse_stores()
        if self.registration is not None:
            self.registration.drain()
        return await self.stack.drain(self.drain_timeout_s)
