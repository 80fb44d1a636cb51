"""Brings what was seen from outside into the registry."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from lmcache_core.errors import CapacityError
from lmcache_core.p2p import Peer

from lmcache_broker.discovery.slices import Sighting
from lmcache_broker.peers.registry import PeerRegistry

logger = logging.getLogger(__name__)

SIGHTING_TTL_S: Final = 60.0
RENEW_S: Final = 15.0
LEAVING_RENEW_S: Final = 1.0
"""Used while a peer is about to end: it may register only now, at a broker that has just started,
and has little time left for its drain.
"""


class Discovery:
    """Peers that were seen are peers until they are seen no more; those that register are what they
    say of themselves.

    A peer that is about to end gets no new pulls and is asked for its drain; one that has gone
    loses its lease at once.

    Args:
        registry: All peers.
        owner: Whom peers belong to that have not registered: a tenant, or `SHARED_OWNER`.

    Attributes:
        seen: Peers that are seen now, by id.
    """

    def __init__(self, registry: PeerRegistry, owner: str) -> None:
        self._registry = registry
        self._owner = owner
        self._applied: dict[str, Sighting] = {}
        self.seen: Mapping[str, Sighting] = {}
        self._changed = asyncio.Event()

    def see(self, seen: Mapping[str, Sighting]) -> None:
        """Replace the set of peers that are seen. Returns at once."""
        self.seen = dict(seen)
        self._changed.set()

    async def keep(self) -> None:
        """Apply what has changed, and now and then all of it; to be repeated."""
        is_hasty = any(sighting.is_leaving for sighting in self.seen.values())
        try:
            async with asyncio.timeout(LEAVING_RENEW_S if is_hasty else RENEW_S):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()
        await self._apply(self.seen)

    async def _apply(self, seen: Mapping[str, Sighting]) -> None:
        for peer_id, old in list(self._applied.items()):
            new = seen.get(peer_id)
            if new is None or new.distributed_url != old.distributed_url:
                await self._registry.forget(peer_id, old.distributed_url)
                del self._applied[peer_id]
        for sighting in seen.values():
            self._applied[sighting.id] = sighting
            if sighting.is_leaving:
                await self._registry.see_leaving(sighting.id, sighting.distributed_url)
            elif sighting.is_ready:
                self._sight(sighting)

    def _sight(self, sighting: Sighting) -> None:
        at = sighting.distributed_url
        peer = Peer(sighting.id, 0, at, sighting.kind, sighting.zone, sighting.node)
        try:
            self._registry.directory.sight(self._owner, peer, SIGHTING_TTL_S)
        except CapacityError as exc:
            logger.warning("seen peer not registered: peer=%s error=%s", sighting.id, exc)
