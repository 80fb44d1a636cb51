"""Peers that are known before they register: from a list, or from the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import ConfigError

from lmcache_broker.discovery.cluster import ClusterApi
from lmcache_broker.discovery.costs import COST_INTERVAL_S, DeletionCosts
from lmcache_broker.discovery.discovery import Discovery
from lmcache_broker.discovery.slices import Sighting
from lmcache_broker.discovery.watch import EndpointWatch
from lmcache_broker.peers.directory import SHARED_OWNER
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.settings import DiscoverySettings

POD_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_STEP_S: Final = 0.001
"""Between two lists or watches; what they have to wait for, they wait for themselves."""


@dataclass(slots=True)
class Discovering:
    """The work of a discovery, while it is open.

    Attributes:
        discovery: What it brings peers to.
        api: Where they come from; None for a list that never changes.
        watch: What follows it there; None without one.
        costs: What tells the cluster which pods to end first; None where that is not wanted.
    """

    discovery: Discovery
    api: ClusterApi | None = None
    watch: EndpointWatch | None = None
    costs: DeletionCosts | None = None
    _tasks: TaskSupervisor = field(
        default_factory=lambda: TaskSupervisor("broker-discovery", max_tasks=3)
    )

    async def open(self) -> None:
        """Begin. Does not wait for the cluster.

        Raises:
            ConfigError: There is no cluster here, or a file cannot be read.
        """
        if self.api is not None:
            await self.api.open()
        if self.watch is not None:
            self._tasks.repeat("watch", self.watch.follow, _STEP_S)
        if self.costs is not None:
            self._tasks.repeat("deletion-costs", self.costs.update, COST_INTERVAL_S)
        self._tasks.repeat("apply", self.discovery.keep, _STEP_S)

    async def close(self) -> None:
        """End the work and the connections. Idempotent."""
        await self._tasks.close()
        if self.api is not None:
            await self.api.close()


async def create_discovery(
    settings: DiscoverySettings, registry: PeerRegistry
) -> Discovering | None:
    """Return what the settings ask for, not opened; None where peers are known by registrations
    alone.

    Raises:
        ConfigError: The namespace is not given, and this is no pod.
    """
    if settings.discovery == "registration":
        return None
    discovery = Discovery(registry, settings.discovery_tenant or SHARED_OWNER)
    if settings.discovery == "static":
        discovery.see({peer.id: Sighting(**peer.model_dump()) for peer in settings.static_peers})
        return Discovering(discovery)
    namespace = settings.kubernetes_namespace
    if namespace is None:
        namespace = await asyncio.to_thread(_pod_namespace)
    api = ClusterApi(settings, namespace)
    costs = DeletionCosts(api, discovery, registry) if settings.pod_deletion_cost else None
    return Discovering(discovery, api, EndpointWatch(api, discovery.see), costs)


def _pod_namespace() -> str:
    try:
        return POD_NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError as exc:
        raise ConfigError(
            f"kubernetes_namespace is not set, and this is no pod ({POD_NAMESPACE_FILE} cannot be"
            " read): set it"
        ) from exc
