"""The running sidecar: its parts, as routes and probes see them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache_core.lookup import InstanceReporter
from lmcache_core.memory import SharedArena
from lmcache_core.p2p import PeerRegistration
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.local_store import LOCAL_TIERS
from lmcache_core.storage.pin_board import PinBoard
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.tiers import TierSet
from lmcache_servicekit.errors import ConflictError, PermissionDeniedError
from lmcache_servicekit.settings import is_loopback

from lmcache_sidecar.arena import ArenaKeeper
from lmcache_sidecar.descriptions import Descriptions
from lmcache_sidecar.explainer import Explainer
from lmcache_sidecar.handover import Drain
from lmcache_sidecar.settings import SidecarSettings
from lmcache_sidecar.socket import SocketServer


@dataclass(slots=True)
class SidecarParts:
    """Everything that the lifespan has opened.

    Attributes:
        settings: As loaded.
        keeper: The shared memory, and what outlives this process of it.
        stack: All tiers.
        tiers: The same, by what they are.
        socket_server: Clients of the pod.
        drain: The way to the end.
        pins: What operators keep hot.
        explainer: Tells where chunks are.
        descriptions: How engines name KV.
        distributed_url: Where peers reach this sidecar.
        reporter: Reports to lookup; None without a lookup_url.
        registration: Lease at the broker; None without a broker_url.
        started_at: On the monotonic clock.
    """

    settings: SidecarSettings
    keeper: ArenaKeeper
    stack: TierStack
    tiers: TierSet
    socket_server: SocketServer
    drain: Drain
    pins: PinBoard
    explainer: Explainer
    descriptions: Descriptions
    distributed_url: str = ""
    reporter: InstanceReporter | None = None
    registration: PeerRegistration | None = None
    started_at: float = field(default_factory=time.monotonic)

    @property
    def instance(self) -> str:
        """Instance id."""
        return self.settings.instance_id

    @property
    def arena(self) -> SharedArena:
        """The shared memory."""
        return self.keeper.arena

    @property
    def local_tiers(self) -> tuple[StorageBackend, ...]:
        """Those tiers that keep chunks in this pod."""
        return self.tiers.local

    @property
    def is_draining(self) -> bool:
        """Whether this sidecar takes nothing new."""
        return self.drain.has_begun

    @property
    def is_registered(self) -> bool:
        """Whether lookup and broker (where configured) know this sidecar now."""
        known = self.reporter is None or self.reporter.registered
        return known and (self.registration is None or self.registration.registered)

    @property
    def has_neighbours(self) -> bool:
        """Whether there is a lookup and a broker to register at."""
        return self.reporter is not None or self.registration is not None

    @property
    def is_settled(self) -> bool:
        """Whether everything stored has been written below and reported to lookup."""
        return not self.stack.is_writing and (self.reporter is None or self.reporter.synced)

    def takes_handovers(self) -> bool:
        """Whether peers may put chunks here just now."""
        return self.settings.accept_handover and not self.is_draining

    def require_serving(self) -> None:
        """For what makes no sense at the end.

        Raises:
            ConflictError: The sidecar is on its way to it.
        """
        if self.is_draining:
            raise ConflictError("this sidecar is draining: it keeps nothing any more")

    def require_loopback(self) -> None:
        """For what no other machine may ask.

        Raises:
            PermissionDeniedError: REST listens on an address that others can reach.
        """
        if not is_loopback(self.settings.host):
            raise PermissionDeniedError(
                "this call is served on loopback only; this sidecar has"
                f" host={self.settings.host!r}"
            )

    async def clear(self, tiers: Sequence[str] = LOCAL_TIERS) -> int:
        """Forget every chunk of these local tiers; the number in the one that held most."""
        num_chunks = await self.stack.clear(search_range=tiers)
        await self.pins.expire()
        return num_chunks

    def begin_drain(self) -> None:
        """Take nothing new from now on: what the parts do at once, before anything is waited
        for.
        """
        self.socket_server.refuse_stores()
        self.pins.close()
        if self.registration is not None:
            self.registration.drain()
