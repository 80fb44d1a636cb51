"""Opens the storage's parts in order and closes them in reverse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import ConfigError
from lmcache_core.lookup import InstanceReporter, LookupClient
from lmcache_core.memory import ArenaAllocator
from lmcache_core.p2p import BrokerClient, Peer, PeerFigures, PeerRegistration, distributed_url_of
from lmcache_core.p2p.figures import tier_figures
from lmcache_core.storage import DiskBackend, LocalCPUBackend
from lmcache_core.storage.announcer import TierAnnouncer
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.client_view import ClientView
from lmcache_core.storage.guard import GuardOptions
from lmcache_core.storage.local_store import LocalStore
from lmcache_core.storage.pin_board import PinBoard
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.tiers import DiskSpec, HotSpec, TierSet, TiersSpec, build_tiers
from lmcache_core.telemetry import Counters
from lmcache_core.wire import LmServer, ServedStore, ServerLimits
from lmcache_servicekit.audit import handover_audit
from lmcache_servicekit.collectors import CounterCollector, TierCollector
from lmcache_servicekit.listening import naming_listener
from lmcache_servicekit.outgoing import client_tls, shown_token
from lmcache_servicekit.state import ServiceState, service_state

from lmcache_storage.chunks.service import ChunkDoor, Gate
from lmcache_storage.compat import create_compat_server
from lmcache_storage.handover.door import HandoverDoor
from lmcache_storage.handover.drain import Drain
from lmcache_storage.handover.finding import create_members
from lmcache_storage.handover.held import HeldChunks
from lmcache_storage.handover.leaving import Leaving, StayingStore
from lmcache_storage.handover.mover import Mover
from lmcache_storage.handover.neighbours import Neighbours
from lmcache_storage.handover.rebalancer import LOOK_S, Rebalancer
from lmcache_storage.health import add_health_checks
from lmcache_storage.metrics import DESCRIBED
from lmcache_storage.parts import StorageParts
from lmcache_storage.s3 import S3_TIER, create_s3_backend
from lmcache_storage.settings import StorageSettings

CLIENT_TIMEOUT_S = 1.0
PIN_CHECK_S = 1.0
BUCKET_CALLS = 6
"""Requests, one after the other, that a call of the bucket's tier may take; each has
`s3_timeout_s`.
"""
PENDING_S3_SHARE = 8
"""What waits to be written to the bucket may hold one part in this many of the memory: less than
handovers wait for.
"""


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
        self._tasks = TaskSupervisor("storage-pins")
        self._broker: BrokerClient | None = None
        self._announcer = TierAnnouncer(settings.tenant)
        self._token = shown_token(settings.service_token_file)
        self._tls = client_tls(settings)

    async def open(self) -> StorageParts:
        settings = self._settings
        bucket = create_s3_backend(settings)
        tiers = await self._make_tiers(bucket)
        hot, disk = tiers.hot, tiers.disk_files
        pending_bytes = {S3_TIER: settings.memory_bytes // PENDING_S3_SHARE}
        stack = tiers.stack(self._announcer, pending_bytes=pending_bytes)
        self._exits.push_async_callback(stack.close, settings.drain_timeout_s)
        await stack.open()
        gate, counters = Gate(), Counters()
        limits = self._limits()
        held = HeldChunks(hot, disk, tiers.guarded_disk, settings.tier_timeout_s)
        leaving = Leaving()
        served = ClientView(
            StayingStore(
                LocalStore(stack, gate.is_open, settings.tier_timeout_s, tiers=None), leaving
            )
        )
        near = ClientView(
            StayingStore(LocalStore(stack, gate.is_open, settings.tier_timeout_s), leaving)
        )
        store = HandoverDoor(served, counters, held, stack, leaving, gate.is_open)
        self._state.registry.register(CounterCollector(counters, DESCRIBED))
        self._state.registry.register(TierCollector(stack.stats))
        lm_server = LmServer(
            store,
            self._state.tokens.authenticate,
            host=settings.lm_host,
            port=settings.lm_port,
            limits=limits,
            name=settings.instance_id,
        )
        with naming_listener("lm_host", settings.lm_host, "lm_port", settings.lm_port):
            await lm_server.open(self._state.tls, self._state.tracer)
        self._exits.push_async_callback(lm_server.close, float(settings.shutdown_grace_s))
        self._state.ports["lm_port"] = lm_server.port
        await self._open_compat(store, counters)
        url = settings.advertise_url or distributed_url_of(
            settings.lm_host, lm_server.port, settings.tls_cert_file is not None
        )
        registration = await self._join_broker(url, [hot] if disk is None else [hot, disk])
        pins = PinBoard(stack, settings.memory_bytes, settings.tier_timeout_s)
        self._tasks.repeat("pins", pins.expire, PIN_CHECK_S)
        self._exits.callback(pins.close)
        self._exits.push_async_callback(self._tasks.close)
        neighbours, drain = await self._know_the_others(stack, held, store, pins, counters, gate)
        parts = StorageParts(
            settings.instance_id,
            url,
            stack,
            (hot,) if disk is None else (hot, disk),
            ChunkDoor(store, near, gate, limits),
            lm_server,
            await self._join_lookup(hot, disk),
            registration,
            pins,
            drain,
            neighbours,
            bucket,
        )
        if registration is not None:
            drain.when_it_begins(registration.drain)
        if settings.hand_over_on_stop:
            self._state.before_stop.append(
                drain.run
            )  # while REST tells how far it is, and both doors still serve
        add_health_checks(self._state.health, parts)
        return parts

    def _limits(self) -> ServerLimits:
        """Of both doors."""
        settings = self._settings
        return ServerLimits(
            max_connections=settings.max_connections,
            max_blob_bytes=settings.max_record_bytes,
            admit=self._state.admit,
            note_handovers=handover_audit("lmcache-storage", settings.instance_id),
        )

    async def _know_the_others(
        self,
        stack: TierStack,
        held: HeldChunks,
        door: HandoverDoor,
        pins: PinBoard,
        counters: Counters,
        gate: Gate,
    ) -> tuple[Neighbours | None, Drain]:
        """Find the other servers of this tier, give them what belongs there, and be ready to
        give them the rest.
        """
        settings = self._settings
        members = create_members(settings, self._broker, self._token, self._tls)
        neighbours = mover = None
        if members is not None:
            await members.open()
            self._exits.push_async_callback(members.close)
            neighbours = Neighbours(members, settings.instance_id, settings.tenant)
            mover = Mover(held, neighbours, counters)
        if neighbours is not None and mover is not None and settings.rebalance:
            tasks = TaskSupervisor("rebalance")
            tasks.repeat(
                "look",
                Rebalancer(held, stack, neighbours, mover, door, pins, gate.is_open).look,
                LOOK_S,
            )
            self._exits.push_async_callback(tasks.close)
        drain = Drain(settings.drain_timeout_s, stack, held, neighbours, mover)
        drain.when_it_begins(gate.close)
        drain.when_it_begins(pins.close)
        self._exits.push_async_callback(drain.close)
        return neighbours, drain

    async def _open_compat(self, store: ServedStore, counters: Counters) -> None:
        server = create_compat_server(self._settings, store, counters)
        if server is not None:
            host, port = self._settings.lmcache_compat_host, self._settings.lmcache_compat_port or 0
            with naming_listener("lmcache_compat_host", host, "lmcache_compat_port", port):
                await server.open()
            self._exits.push_async_callback(server.close, float(self._settings.shutdown_grace_s))
            self._state.ports["lmcache_compat_port"] = server.port

    async def _make_tiers(self, bucket: StorageBackend | None) -> TierSet:
        settings = self._settings
        try:
            arena = await asyncio.to_thread(ArenaAllocator.anonymous, settings.memory_bytes)
        except OSError as exc:
            raise ConfigError(
                f"memory_gb={settings.memory_gb}: {exc.strerror}; lower it or give the container"
                " more memory"
            ) from exc
        disk = None
        if settings.disk_path is not None:
            disk = DiskSpec(
                path=settings.disk_path,
                capacity_bytes=settings.disk_bytes,
                limits=settings.disk_limits,
                fsync=settings.disk_fsync,
            )
        bucket_guard = GuardOptions(timeout_s=BUCKET_CALLS * settings.s3_timeout_s)
        spec = TiersSpec(
            hot=HotSpec(memory=arena, limits=settings.memory_limits),
            disk=disk,
            further=bucket,
            policy=settings.eviction_policy,
            is_priced=False,  # who asks cannot compute anything here
            guards={S3_TIER: bucket_guard},
            removed_from=self._announcer.removed_from,
        )
        return build_tiers(spec)

    async def _join_lookup(
        self, hot: LocalCPUBackend, disk: DiskBackend | None
    ) -> InstanceReporter | None:
        """Tell lookup what is held, in the background: it is not waited for."""
        settings = self._settings
        if settings.lookup_url is None:
            return None
        client = LookupClient(
            settings.lookup_url, self._token, CLIENT_TIMEOUT_S, tls=self._tls.context
        )
        await client.open()
        self._exits.push_async_callback(client.close)
        reporter = InstanceReporter(
            client, settings.instance_id, "storage", self._announcer.snapshot
        )
        self._announcer.connect(reporter, [hot] if disk is None else [hot, disk])
        await reporter.open()
        self._exits.push_async_callback(reporter.close)
        if disk is not None:
            tasks = TaskSupervisor("storage")
            tasks.start("announce-disk", self._announcer.announce_when_loaded(disk))
            self._exits.push_async_callback(tasks.close)
        return reporter

    async def _join_broker(
        self, advertise_url: str, tiers: Sequence[StorageBackend]
    ) -> PeerRegistration | None:
        """Become known to the broker, in the background: it is not waited for."""
        settings = self._settings
        if settings.broker_url is None:
            return None
        client = BrokerClient(
            settings.broker_url, self._token, CLIENT_TIMEOUT_S, tls=self._tls.context
        )
        await client.open()
        self._exits.push_async_callback(client.close)
        self._broker = client
        peer = Peer(
            settings.instance_id,
            time.time_ns(),
            advertise_url,
            "storage",
            settings.zone,
            settings.node,
        )

        def figures() -> PeerFigures:
            """What engines asked for, their sidecars tell."""
            return PeerFigures(tiers=tier_figures({tier.name: tier.stats() for tier in tiers}))

        registration = PeerRegistration(client, peer, figures=figures)
        await registration.open()
        self._exits.push_async_callback(registration.close)
        return registration
