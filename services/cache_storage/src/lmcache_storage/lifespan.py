"""Opens the storage's parts in order and closes them in reverse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import ConfigError
from lmcache_core.lookup import InstanceReporter, LookupClient
from lmcache_core.memory import ArenaAllocator
from lmcache_core.p2p import BrokerClient, Peer, PeerRegistration
from lmcache_core.storage import LocalCPUBackend, LocalDiskBackend
from lmcache_core.storage.announcer import TierAnnouncer
from lmcache_core.storage.eviction import create_policy
from lmcache_core.storage.local_store import LocalStore
from lmcache_core.storage.served_door import ServedDoor
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.wrappers import BreakerBackend
from lmcache_core.telemetry import Counters
from lmcache_core.wire import LmServer, ServedStore, ServerLimits
from lmcache_servicekit.collectors import CounterCollector, TierCollector
from lmcache_servicekit.secret_file import read_secret_file
from lmcache_servicekit.state import ServiceState, service_state

from lmcache_storage.chunks.service import ChunkDoor, Gate
from lmcache_storage.compat import create_compat_server
from lmcache_storage.counted_store import CountedDoor
from lmcache_storage.health import add_health_checks
from lmcache_storage.metrics import DESCRIBED
from lmcache_storage.parts import StorageParts
from lmcache_storage.settings import StorageSettings

CLIENT_TIMEOUT_S = 1.0


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open everything, serve, close everything."""
    async with AsyncExitStack() as exits:
        app.state.storage = await _Opening(service_state(app), exits).open()
        yield


class _Opening:
    """Opens the parts one after the other; `exits` closes them in reverse."""

    def __init__(self, state: ServiceState, exits: AsyncExitStack) -> None:
        settings = state.settings
        assert isinstance(settings, StorageSettings)
        self._state = state
        self._settings = settings
        self._exits = exits
        self._announcer = TierAnnouncer(settings.tenant)
        self._token = read_secret_file(settings.service_token_file, "service_token_file")

    async def open(self) -> StorageParts:
        settings = self._settings
        hot, disk = await self._make_tiers()
        stack = TierStack(hot, [] if disk is None else [BreakerBackend(disk)], listener=self._announcer)
        self._exits.push_async_callback(stack.close, settings.drain_timeout_s)
        await stack.open()
        gate, counters = Gate(), Counters()
        limits = ServerLimits(max_connections=settings.max_connections, max_blob_bytes=settings.max_record_bytes)
        store = CountedDoor(ServedDoor(LocalStore(stack, gate.is_open, settings.tier_timeout_s)), counters)
        self._state.registry.register(CounterCollector(counters, DESCRIBED))
        self._state.registry.register(TierCollector(stack.stats))
        lm_server = LmServer(store, self._state.tokens.authenticate, host=settings.lm_host, port=settings.lm_port, limits=limits)
        await lm_server.open()
        self._exits.push_async_callback(lm_server.close, float(settings.shutdown_grace_s))
        self._state.ports["lm_port"] = lm_server.port
        await self._open_compat(store, counters)
        parts = StorageParts(
            settings.instance_id,
            settings.advertise_url or f"lm://{_in_url(settings.lm_host)}:{lm_server.port}",
            stack,
            (hot,) if disk is None else (hot, disk),
            ChunkDoor(store, gate, limits),
            lm_server,
            await self._join_lookup(hot, disk),
            None,
            settings.drain_timeout_s,
        )
        parts.registration = await self._join_broker(parts.advertise_url)
        add_health_checks(self._state.health, parts)
        return parts

    async def _open_compat(self, store: ServedStore, counters: Counters) -> None:
        server = create_compat_server(self._settings, store, counters)
        if server is not None:
            await server.open()
            self._exits.push_async_callback(server.close, float(self._settings.shutdown_grace_s))
            self._state.ports["lmcache_compat_port"] = server.port

    async def _make_tiers(self) -> tuple[LocalCPUBackend, LocalDiskBackend | None]:
        settings = self._settings
        try:
            arena = await asyncio.to_thread(ArenaAllocator.anonymous, settings.memory_bytes)
        except OSError as exc:
            raise ConfigError(f"memory_gb={settings.memory_gb}: {exc.strerror}; lower it or give the container more memory") from exc
        policy = create_policy(settings.eviction_policy)
        hot = LocalCPUBackend(arena, policy, self._announcer.removed_from(LocalCPUBackend.name), limits=settings.memory_limits)
        if settings.disk_path is None:
            return hot, None
        return hot, LocalDiskBackend(
            settings.disk_path,
            settings.disk_bytes,
            create_policy(settings.eviction_policy),
            self._announcer.removed_from(LocalDiskBackend.name),
            settings.disk_fsync,
            limits=settings.disk_limits,
        )

    async def _join_lookup(self, hot: LocalCPUBackend, disk: LocalDiskBackend | None) -> InstanceReporter | None:
        """Tell lookup what is held, in the background: it is not waited for."""
        settings = self._settings
        if settings.lookup_url is None:
            return None
        client = LookupClient(settings.lookup_url, self._token, CLIENT_TIMEOUT_S)
        await client.open()
        self._exits.push_async_callback(client.close)
        reporter = InstanceReporter(client, settings.instance_id, "storage", self._announcer.snapshot)
        self._announcer.connect(reporter, [hot] if disk is None else [hot, disk])
        await reporter.open()
        self._exits.push_async_callback(reporter.close)
        if disk is not None and disk.stats()["is_loading"]:
            tasks = TaskSupervisor("storage")
            tasks.start("announce-disk", self._announcer.announce_when_loaded(disk))
            self._exits.push_async_callback(tasks.close)
        return reporter

    async def _join_broker(self, advertise_url: str) -> PeerRegistration | None:
        """Become known to the broker, in the background: it is not waited for."""
        settings = self._settings
        if settings.broker_url is None:
            return None
        client = BrokerClient(settings.broker_url, self._token, CLIENT_TIMEOUT_S)
        await client.open()
        self._exits.push_async_callback(client.close)
        peer = Peer(settings.instance_id, time.time_ns(), advertise_url, "storage", settings.zone, settings.node)
        registration = PeerRegistration(client, peer)
        await registration.open()
        self._exits.push_async_callback(registration.close)
        return registration


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
