"""The running cache storage: its parts, and the order in which they open and close."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, FastAPI, Request
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import CapacityError, ConfigError, UnavailableError
from lmcache_core.keys import ChunkKey
from lmcache_core.memory import ArenaAllocator
from lmcache_core.names import BUCKET_TIER, DISK_TIER
from lmcache_core.p2p import PeerFigures
from lmcache_core.storage.guard import GuardOptions
from lmcache_core.storage.served import LocalStore
from lmcache_core.storage.tiers import HotSpec, TierSet, TiersSpec, build_tiers
from lmcache_core.wire.capabilities import Accepts
from lmcache_core.wire.served import ServedStore, ServerLimits
from lmcache_core.wire.server import LmServer
from lmcache_node.local_chunks import LocalChunks
from lmcache_node.node import Node, disk_spec
from lmcache_servicekit.audit import handover_audit
from lmcache_servicekit.listening import naming_listener
from lmcache_servicekit.state import ServiceState, service_state
from typing_extensions import override

from lmcache_storage.compat.server import create_compat_server
from lmcache_storage.compat.values import is_foreign
from lmcache_storage.handover.mover import Mover, ServerHandover
from lmcache_storage.handover.rebalancer import LOOK_S, Rebalancer
from lmcache_storage.handover.servers import OtherServers, create_members
from lmcache_storage.metrics import DESCRIBED
from lmcache_storage.problems import DrainingError
from lmcache_storage.s3 import create_s3_backend
from lmcache_storage.served_store import Departures, StorageStore
from lmcache_storage.settings import StorageSettings

if TYPE_CHECKING:
    from lmcache_storage.s3.backend import S3Backend

BUCKET_CALLS = 6
"""Consecutive requests that a call of the bucket's tier may need; each has `s3_timeout_s`."""
PENDING_S3_SHARE = 8
"""Pending writes to the bucket may hold one part in this many of the memory, less than the limit at
which handovers wait.
"""


class StorageNode(Node[StorageSettings]):
    """A node that serves all clients with a token: lm://, REST, and unmodified LMCache clients.

    Attributes:
        bucket: The further store; None if none is configured.
        limits: Bounds on lm:// connections and on bodies over REST.
        near: The same chunks without the bucket, which a store must not wait for.
        servers: The other servers of this tier; None if none are configured.
    """

    bucket: S3Backend | None
    limits: ServerLimits
    store: StorageStore
    near: LocalStore
    servers: OtherServers | None

    def __init__(self, state: ServiceState) -> None:
        assert isinstance(state.settings, StorageSettings)
        super().__init__(state, state.settings, "storage")
        self._listing = asyncio.Lock()

    @override
    async def open(self) -> None:
        settings = self.settings
        await self.open_clients()
        self.bucket = create_s3_backend(settings)
        pending_bytes = {BUCKET_TIER: settings.memory_bytes // PENDING_S3_SHARE}
        await self.open_tiers(
            await self._make_tiers(),
            DESCRIBED,
            pending_bytes=pending_bytes,
            drain_s=settings.drain_timeout_s,
        )
        tiers, stack = self.tiers, self.stack
        # LMCache clients know one server, and would not find their values on another.
        chunks = LocalChunks(
            tiers.hot,
            tiers.disk,
            tiers.guarded(DISK_TIER),
            settings.tier_timeout_s,
            lambda key: not is_foreign(key),
        )
        members = create_members(settings, self.broker, self.token, self.tls)
        self.servers = mover = None
        if members is not None:
            self.servers = OtherServers(members, settings.instance_id)
            mover = Mover(chunks, self.servers, self.counters)
        self.make_drain(ServerHandover(chunks, self.servers, mover))
        timeout_s = settings.tier_timeout_s
        self.near = LocalStore(stack, self.takes_chunks, timeout_s)
        self.store = StorageStore(
            stack, tiers.disk, Departures(), self.takes_chunks, timeout_s, self.counters
        )
        self.limits = ServerLimits(
            max_connections=settings.max_connections,
            max_blob_bytes=settings.max_record_bytes,
            admit=self.state.admit,
            note_handovers=handover_audit("lmcache-storage", settings.instance_id),
        )
        server = LmServer(
            self.store,
            self.state.tokens.authenticate,
            host=settings.lm_host,
            port=settings.lm_port,
            limits=self.limits,
            name=settings.instance_id,
        )
        grace_s = float(settings.shutdown_grace_s)
        await self.serve(server, settings.advertise_url, grace_s)
        if settings.lmcache_compat_port is not None:
            compat = create_compat_server(settings, self.store, self.counters)
            host, port = settings.lmcache_compat_host, settings.lmcache_compat_port
            self.exits.push_async_callback(compat.listener.close, grace_s)
            with naming_listener("lmcache_compat_host", host, "lmcache_compat_port", port):
                await compat.open(host, port)
            self.state.ports["lmcache_compat_port"] = compat.listener.port
        await self.join(lambda: PeerFigures(tiers=self.tier_figures()))
        if members is not None:
            await self.opened(members)
        if self.servers is not None and mover is not None and settings.rebalance:
            rebalancer = Rebalancer(
                chunks, stack, self.servers, mover, self.store, self.pins, self.takes_chunks
            )
            tasks = TaskSupervisor("rebalance")
            self.exits.push_async_callback(tasks.close)
            tasks.repeat("look", rebalancer.look, LOOK_S)
        self.drain_at_stop(before_stop=settings.hand_over_on_stop, at_exit=False)
        self._add_health_checks()

    def near_for_client(self, accepts: Accepts) -> ServedStore:
        """Return what `store.for_client` does, without the bucket."""
        return self.near if accepts.lossy else self.store.lossless.over(self.near)

    @override
    def refuse_stores(self) -> None:
        """Do nothing: every store checks `takes_chunks`."""

    @override
    def accept_stores(self) -> None:
        """Do nothing, for the same reason."""

    async def holdings(self, tenant: str) -> list[tuple[ChunkKey, int, list[str]]]:
        """Return key, size in bytes and tiers of every chunk of a tenant, ordered by key."""

        def collect() -> list[tuple[ChunkKey, int, list[str]]]:
            found: dict[ChunkKey, tuple[int, list[str]]] = {}
            for tier in self.local_tiers:
                for key, num_bytes in tier.held():
                    if key.tenant == tenant:
                        found.setdefault(key, (num_bytes, []))[1].append(tier.name)
            ordered = sorted(found.items(), key=lambda item: item[0].key.canonical())
            return [(key, num_bytes, names) for key, (num_bytes, names) in ordered]

        # Takes time proportional to the number of chunks, so it runs in a thread; one at a time,
        # since other work needs these threads, too.
        async with self._listing:
            return await asyncio.to_thread(collect)

    async def _make_tiers(self) -> TierSet:
        settings = self.settings
        try:
            arena = await asyncio.to_thread(ArenaAllocator.anonymous, settings.memory_bytes)
        except CapacityError as exc:
            raise ConfigError(
                f"memory_gb={settings.memory_gb:g}: {exc}, or give the container more memory"
            ) from exc
        return build_tiers(
            TiersSpec(
                hot=HotSpec(memory=arena, limits=settings.memory_limits),
                disk=disk_spec(settings),
                further=self.bucket,
                policy=settings.eviction_policy,
                is_priced=False,  # a caller of this server cannot compute anything here
                guards={BUCKET_TIER: GuardOptions(timeout_s=BUCKET_CALLS * settings.s3_timeout_s)},
                removed_from=self.announcer.removed_from,
            )
        )

    def _add_health_checks(self) -> None:
        """Register the checks of `/readyz`. Without disk, bucket, lookup or broker the storage
        still serves from memory: they only degrade it.
        """
        health = self.state.health
        reporter, registration, bucket = self.reporter, self.registration, self.bucket

        async def stores() -> str:
            if not self.takes_chunks():
                raise DrainingError("draining")
            return "new chunks are accepted"

        async def arena() -> str:
            figures = self.stack.hot.stats()
            return f"{figures['used_bytes']} of {figures['capacity_bytes']} bytes used"

        health.add("stores", stores)
        health.add("arena", arena)
        if (disk := self.tiers.disk) is not None:

            async def takes_writes() -> str:
                figures = disk.stats()
                if figures["is_failing"]:
                    raise UnavailableError(
                        "the disk refuses writes; new chunks are kept in memory only"
                    )
                if figures["is_loading"]:
                    return "its directory is being read"
                return f"{figures['num_chunks']} chunks"

            health.add("disk", takes_writes, required=False)
        if bucket is not None:

            async def answers() -> str:
                await bucket.probe()
                if bucket.refuses_writes:
                    raise UnavailableError(
                        "the bucket refuses writes; new chunks are kept in memory and on disk only"
                    )
                return "answers"

            health.add("s3", answers, required=False, where=bucket.where)
        if reporter is not None:

            async def lookup() -> str:
                if not reporter.registered:
                    raise UnavailableError(
                        "not registered at lookup; others cannot find what is held here"
                    )
                return "registered"

            health.add("lookup", lookup, required=False)
        if registration is not None:

            async def broker() -> str:
                if not registration.registered:
                    raise UnavailableError("not registered at the broker; others are not sent here")
                return "registered"

            health.add("broker", broker, required=False)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Run the cache storage of an app."""
    async with StorageNode(service_state(app)) as app.state.storage:
        yield


async def _storage_of(request: Request) -> StorageNode:
    storage: StorageNode = request.app.state.storage
    return storage


RunningStorage = Annotated[StorageNode, Depends(_storage_of)]
"""Dependency of routes that need the running storage."""
