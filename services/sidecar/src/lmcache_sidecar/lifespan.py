"""Opens the sidecar's parts in order and closes them in reverse."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import AuthenticationError, CapacityError, ConfigError
from lmcache_core.lookup import InstanceReporter, LookupClient
from lmcache_core.memory import SharedArena
from lmcache_core.memory.shared import ArenaFile
from lmcache_core.p2p import BrokerClient, Peer, PeerRegistration, distributed_url_of
from lmcache_core.security import Principal, TicketKeyFile, TicketVerifier
from lmcache_core.storage.announcer import TierAnnouncer
from lmcache_core.storage.codecs import Codecs, create_codecs
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.encoding_store import EncodingStore
from lmcache_core.storage.hot import RECEIVING_SHARE, LocalCPUBackend
from lmcache_core.storage.local_store import LocalStore
from lmcache_core.storage.pin_board import PinBoard
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.tiers import HotSpec, TierSet
from lmcache_core.telemetry import Counters
from lmcache_core.wire import Authenticate, LmServer, ServerLimits
from lmcache_servicekit.collectors import CodecErrorCollector, CounterCollector, TierCollector
from lmcache_servicekit.listening import naming_listener
from lmcache_servicekit.outgoing import client_tls, shown_token
from lmcache_servicekit.secret_file import read_secret_file
from lmcache_servicekit.state import ServiceState, service_state
from lmcache_servicekit.tier_settings import BYTES_PER_GB

from lmcache_sidecar.arena import ArenaKeeper, open_arena
from lmcache_sidecar.explainer import Explainer
from lmcache_sidecar.handover import (
    BrokerWishes,
    Copier,
    Drain,
    Handover,
    HandoverDoor,
    LocalChunks,
    PeerSource,
    RemoteSource,
    TakerSource,
)
from lmcache_sidecar.heartbeat import HeartbeatFigures
from lmcache_sidecar.holders import Holders
from lmcache_sidecar.load import machine_load
from lmcache_sidecar.metrics import DESCRIBED
from lmcache_sidecar.parts import SidecarParts
from lmcache_sidecar.run_directory import make_private
from lmcache_sidecar.settings import SidecarSettings, default_arena_directory, default_run_directory
from lmcache_sidecar.socket import SessionContext, SocketServer
from lmcache_sidecar.sole import MEASURE_INTERVAL_S, SoleBytes
from lmcache_sidecar.tiers import build_tiers

logger = logging.getLogger(__name__)
wait_before_retry = asyncio.sleep

CLIENT_TIMEOUT_S = 1.0
PIN_CHECK_S = 1.0
ARENA_RETRY_S = 1.0


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open everything, serve, close everything."""
    state = service_state(app)
    async with AsyncExitStack() as exits:
        app.state.sidecar = await _Opening(state, exits).open()
        yield


class _Opening:
    """Opens the parts one after the other; `exits` closes them in reverse."""

    def __init__(self, state: ServiceState, exits: AsyncExitStack) -> None:
        settings = state.settings
        assert isinstance(settings, SidecarSettings)
        self._state = state
        self._settings = settings
        self._exits = exits
        self._announcer = TierAnnouncer(settings.tenant)
        self._tasks = TaskSupervisor("sidecar")
        self._token = shown_token(settings.service_token_file)
        self._tls = client_tls(settings)
        self._lookup: LookupClient | None = None
        self._broker: BrokerClient | None = None
        self._wishes: BrokerWishes | None = None
        self._sole: SoleBytes | None = None

    async def open(self) -> SidecarParts:
        settings = self._settings
        used = (*settings.socket_path.parents, settings.arena_path, *settings.arena_path.parents)
        for directory in (default_run_directory(), default_arena_directory()):
            if directory in used:
                make_private(directory)
        salt = read_secret_file(settings.salt_file, "salt_file") or ""
        self._state.health.add(
            "arena", _no_arena_yet
        )  # probes are answered while the arena is still waited for
        keeper = await self._open_arena()
        self._exits.callback(keeper.close)
        arena = keeper.arena
        await self._open_clients()
        counters = Counters()
        codecs = create_codecs(
            [settings.disk_serde, settings.remote_serde, settings.peer_serde], counters=counters
        )
        stack, tiers = await self._open_tiers(keeper, codecs)
        self._exits.push_async_callback(self._tasks.close)
        self._exits.callback(keeper.seal)
        self._state.registry.register(CounterCollector(counters, DESCRIBED))
        self._state.registry.register(TierCollector(stack.stats))
        self._state.registry.register(CodecErrorCollector(codecs.figures.errors))
        context = SessionContext(
            stack,
            arena,
            settings.instance_id,
            settings.tenant,
            settings.verify_hot,
            salt,
            settings.tier_timeout_s,
            self._tasks,
            counters,
            keeper.extents,
            tracer=self._state.tracer,
        )
        socket_server = SocketServer(settings.socket_path, context)
        parts = self._make_parts(context, keeper, tiers, socket_server)
        await self._open_peer_server(parts, codecs, counters)
        await self._join(parts, counters)
        await socket_server.open()
        self._exits.push_async_callback(socket_server.close)
        keeper.start(self._tasks, tiers.hot, self._announcer, counters)
        self._add_health_checks(parts)
        self._state.before_stop.append(parts.drain.run)  # while REST tells how far it is
        self._exits.push_async_callback(parts.drain.run)
        _drain_at_signal(parts.drain, self._exits)
        return parts

    def _make_parts(
        self,
        context: SessionContext,
        keeper: ArenaKeeper,
        tiers: TierSet,
        socket_server: SocketServer,
    ) -> SidecarParts:
        settings, stack, counters = self._settings, context.stack, context.counters
        holders = None if self._lookup is None else Holders(self._lookup, settings.instance_id)
        sources: list[TakerSource] = [] if tiers.remote is None else [RemoteSource(tiers.remote)]
        peers: PeerSource | None = None
        if holders is not None and self._broker is not None:
            peers = PeerSource(
                settings.instance_id,
                self._broker,
                holders,
                self._token,
                settings.tier_timeout_s,
                self._tls,
            )
            sources.append(peers)
        listed = next((tier for tier in tiers.local if isinstance(tier, DiskBackend)), None)
        chunks = LocalChunks(settings.tenant, tiers.hot, listed, tiers.disk)
        handover = Handover(chunks, sources, settings.tier_timeout_s, counters)
        if holders is not None:
            self._sole = SoleBytes(chunks, tiers.remote, holders, settings.tier_timeout_s)
            self._tasks.repeat("sole-bytes", self._sole.measure, MEASURE_INTERVAL_S)
        drain = Drain(settings.drain_timeout_s, stack, handover, self._tasks, counters)
        if peers is not None:
            self._wishes = BrokerWishes(
                drain, Copier(chunks, peers.connect, self._tasks, settings.tier_timeout_s, counters)
            )
        pins = PinBoard(stack, context.arena.size, settings.tier_timeout_s)
        self._tasks.repeat("pins", pins.expire, PIN_CHECK_S)
        explainer = Explainer(tiers, holders, settings.tier_timeout_s)
        parts = SidecarParts(
            settings,
            keeper,
            stack,
            tiers,
            socket_server,
            drain,
            pins,
            explainer,
            context.descriptions,
        )
        drain.when_it_begins(parts.begin_drain)
        return parts

    async def _open_arena(self) -> ArenaKeeper:
        """Open the arena; where it has to be a new one while engines still map that of an earlier
        start, its volume may be full: wait.

        Raises:
            CapacityError: It does not fit after `arena_wait_s`.
        """
        settings = self._settings
        size, mode = int(settings.arena_gb * BYTES_PER_GB), int(settings.arena_mode, 8)
        file = ArenaFile(settings.arena_path, size, mode, settings.arena_huge_pages == "advise")
        deadline = time.monotonic() + settings.arena_wait_s
        said = ""
        while True:
            try:
                return ArenaKeeper(
                    await asyncio.to_thread(open_arena, file, settings.arena_recover)
                )
            except CapacityError as exc:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise
                if str(exc) != said:
                    said = str(exc)
                    logger.warning(
                        "%s; trying for %.1f s until engines let go of the memory of an earlier"
                        " start",
                        exc,
                        left_s,
                    )
                await wait_before_retry(min(ARENA_RETRY_S, left_s))

    async def _open_clients(self) -> None:
        settings = self._settings
        if settings.lookup_url is None or settings.broker_url is None:
            return
        self._lookup = LookupClient(
            settings.lookup_url, self._token, CLIENT_TIMEOUT_S, tls=self._tls.context
        )
        self._broker = BrokerClient(
            settings.broker_url, self._token, CLIENT_TIMEOUT_S, tls=self._tls.context
        )
        for client in (self._lookup, self._broker):
            await client.open()
            self._exits.push_async_callback(client.close)

    async def _open_tiers(self, keeper: ArenaKeeper, codecs: Codecs) -> tuple[TierStack, TierSet]:
        """Open the codecs, which may take a while, and then all tiers: nothing is compiled once
        something is served.
        """
        await codecs.open()
        self._exits.push_async_callback(codecs.close)
        limits = self._settings.memory_limits
        clients = None
        if self._lookup is not None and self._broker is not None:
            clients = self._lookup, self._broker
        tiers = build_tiers(
            self._settings,
            HotSpec(memory=keeper.allocator, limits=limits, on_kept=keeper.on_kept),
            codecs,
            self._announcer,
            self._token,
            self._tls,
            clients,
        )
        stack = tiers.stack(self._announcer)
        self._exits.push_async_callback(stack.close)  # what can be written has been, by the drain
        await stack.open()
        return stack, tiers

    async def _open_peer_server(
        self, parts: SidecarParts, codecs: Codecs, counters: Counters
    ) -> None:
        settings = self._settings
        verifier = None
        authenticate: Authenticate = self._state.tokens.authenticate
        if settings.ticket_keys_file is not None:
            verifier = TicketVerifier(
                TicketKeyFile(settings.ticket_keys_file), settings.instance_id
            ).verify
            if settings.auth_tokens_file is None:
                authenticate = _refuse_without_ticket
        store = LocalStore(parts.stack, accepts_puts=parts.takes_handovers)
        door = HandoverDoor(store, settings.tenant, codecs.is_lossy(settings.peer_serde), counters)
        server = LmServer(
            EncodingStore(door, codecs, settings.peer_serde),
            authenticate,
            host=settings.lm_host,
            port=settings.lm_port,
            verify_ticket=verifier,
            limits=ServerLimits(
                admit=self._state.admit,
                max_blob_bytes=parts.stack.hot.stats()["capacity_bytes"] // RECEIVING_SHARE,
            ),
        )
        with naming_listener("lm_host", settings.lm_host, "lm_port", settings.lm_port):
            await server.open(self._state.tls, self._state.tracer)
        self._exits.push_async_callback(server.close)
        self._state.ports["lm_port"] = server.port
        parts.distributed_url = settings.distributed_url or distributed_url_of(
            settings.lm_host, server.port, self._state.tls is not None
        )

    async def _join(self, parts: SidecarParts, counters: Counters) -> None:
        """Become known to lookup and broker, in the background: neither is waited for."""
        if self._lookup is None or self._broker is None:
            return
        parts.reporter = InstanceReporter(
            self._lookup, parts.instance, "sidecar", self._announcer.snapshot
        )
        self._announcer.connect(
            parts.reporter,
            [tier for tier in parts.local_tiers if isinstance(tier, LocalCPUBackend | DiskBackend)],
        )
        settings = self._settings
        peer = Peer(
            id=parts.instance,
            incarnation=time.time_ns(),
            distributed_url=parts.distributed_url,
            kind="sidecar",
            zone=settings.zone,
            node=settings.node,
        )
        figures = HeartbeatFigures(parts.tiers, counters, self._sole)
        parts.registration = PeerRegistration(
            self._broker, peer, machine_load, listener=self._wishes, figures=figures
        )
        for part in (parts.reporter, parts.registration):
            await part.open()
            self._exits.push_async_callback(part.close)
        for tier in parts.local_tiers:
            if isinstance(tier, DiskBackend):
                self._tasks.start("announce-disk", self._announcer.announce_when_loaded(tier))

    def _add_health_checks(self, parts: SidecarParts) -> None:
        async def arena_is_whole() -> str:
            await asyncio.to_thread(_check_arena, parts.arena)
            return f"{parts.arena.size} bytes"

        async def neighbours() -> str:
            if not parts.is_registered:
                raise ConfigError(
                    "not registered at lookup or broker; peers cannot find this sidecar"
                )
            return "registered" if parts.has_neighbours else "none configured"

        self._state.health.add("arena", arena_is_whole)
        self._state.health.add("lookup-and-broker", neighbours, required=False)


def _drain_at_signal(drain: Drain, exits: AsyncExitStack) -> None:
    """SIGUSR1 begins the drain and ends nothing: for the hook of a pod that is to end, which
    needs no token for that.
    """
    if threading.current_thread() is threading.main_thread():  # others get no signals
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, drain.begin)
        exits.callback(loop.remove_signal_handler, signal.SIGUSR1)


def _refuse_without_ticket(token: str | None) -> Principal:
    """With ticket keys and no tokens a ticket is the only way in: "no tokens" must not mean
    "anybody".
    """
    raise AuthenticationError("this sidecar serves peers with a broker's ticket only")


async def _no_arena_yet() -> str:
    raise CapacityError("the shared memory is not allocated yet")


def _check_arena(arena: SharedArena) -> None:
    if not Path(arena.path).exists():
        raise ConfigError(f"the arena file {arena.path} is gone; restart the sidecar")
