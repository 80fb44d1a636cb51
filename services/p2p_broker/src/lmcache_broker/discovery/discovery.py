"""Adds the peers of a list, or those in the cluster, to the registry."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Final

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import CapacityError, ConfigError
from lmcache_core.p2p import Peer
from lmcache_core.security import SHARED_OWNER

from lmcache_broker.discovery.cluster import SERVICE_ACCOUNT, ClusterApi
from lmcache_broker.discovery.costs import COST_INTERVAL_S, DeletionCosts
from lmcache_broker.discovery.watch import EndpointWatch, Sighting
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.settings import DiscoverySettings

logger = logging.getLogger(__name__)

SIGHTING_TTL_S: Final = 60.0
RENEW_S: Final = 15.0
LEAVING_RENEW_S: Final = 1.0
"""Refresh interval while a peer is about to end: it may be registering just now, with a broker that
has just started, and has little time left for its drain.
"""
_STEP_S: Final = 0.001
"""Pause between two lists or watches; each of them waits by itself."""


class Discovery:
    """Keeps peers that are seen from outside in the registry. Once a peer registers, its own
    description applies.

    A peer that is about to end gets no new pulls and is asked to drain; one that is gone loses its
    lease immediately.

    Args:
        owner: Owner of peers that have not registered: a tenant, or `SHARED_OWNER`.
        api: The cluster to follow; None: the caller calls `see`.

    Attributes:
        seen: Peers seen now, by id.
        watch: Follows the cluster; None without one.
        costs: Sets the pods' deletion costs; None if disabled.
    """

    def __init__(self, registry: PeerRegistry, owner: str, api: ClusterApi | None = None) -> None:
        self._registry = registry
        self._owner = owner
        self._api = api
        self.seen: Mapping[str, Sighting] = {}
        self.watch = None if api is None else EndpointWatch(api, self.see)
        self.costs: DeletionCosts | None = None
        if api is not None and api.settings.pod_deletion_cost:
            self.costs = DeletionCosts(api, registry)
        self._applied: dict[str, Sighting] = {}
        self._changed = asyncio.Event()
        self._tasks = TaskSupervisor("broker-discovery", max_tasks=3)

    async def open(self) -> None:
        """Start, without waiting for the cluster.

        Raises:
            ConfigError: This is not in a cluster, or a file cannot be read.
        """
        if self._api is not None:
            await self._api.open()
        if self.watch is not None:
            self._tasks.repeat("watch", self.watch.follow, _STEP_S)
        if (costs := self.costs) is not None:
            self._tasks.repeat("deletion-costs", lambda: costs.update(self.seen), COST_INTERVAL_S)
        self._tasks.repeat("apply", self._apply_changes, _STEP_S)

    async def close(self) -> None:
        """Stop the work and close the connections. Idempotent."""
        await self._tasks.close()
        if self._api is not None:
            await self._api.close()

    def see(self, seen: Mapping[str, Sighting]) -> None:
        """Replace the set of peers that are seen. Returns immediately."""
        self.seen = dict(seen)
        self._changed.set()

    async def _apply_changes(self) -> None:
        """Wait for a change, or until sightings must be renewed, and apply all changes."""
        is_hasty = any(sighting.is_leaving for sighting in self.seen.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVING_RENEW_S if is_hasty else RENEW_S):
                await self._changed.wait()
        self._changed.clear()
        seen = self.seen
        for peer_id, old in list(self._applied.items()):
            new = seen.get(peer_id)
            if new is None or new.peer.distributed_url != old.peer.distributed_url:
                await self._registry.forget(old.peer)
                del self._applied[peer_id]
        for peer_id, sighting in seen.items():
            self._applied[peer_id] = sighting
            if sighting.is_leaving:
                await self._registry.see_leaving(sighting.peer)
            elif sighting.is_ready:
                try:
                    self._registry.directory.sight(self._owner, sighting.peer, SIGHTING_TTL_S)
                except CapacityError as exc:
                    logger.warning("seen peer not registered: peer=%s error=%s", peer_id, exc)


async def create_discovery(settings: DiscoverySettings, registry: PeerRegistry) -> Discovery | None:
    """Return the discovery that the settings select, not opened; None if peers are known only by
    registration.

    Raises:
        ConfigError: The namespace is not set, and this is not a pod.
    """
    if settings.discovery == "registration":
        return None
    owner = settings.discovery_tenant or SHARED_OWNER
    if settings.discovery == "static":
        discovery = Discovery(registry, owner)
        discovery.see(
            {
                peer.id: Sighting(Peer(incarnation=0, **peer.model_dump()))
                for peer in settings.static_peers
            }
        )
        return discovery
    namespace = settings.kubernetes_namespace
    if namespace is None:
        namespace_file = SERVICE_ACCOUNT / "namespace"
        try:
            namespace = await asyncio.to_thread(namespace_file.read_text, "utf-8")
        except OSError as exc:
            raise ConfigError(
                "kubernetes_namespace is not set, and this is not a pod"
                f" ({namespace_file} cannot be read): set it"
            ) from exc
    return Discovery(registry, owner, ClusterApi(settings, namespace.strip()))
