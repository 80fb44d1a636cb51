"""Opens and closes, in order, the common parts of a sidecar and a storage server."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Generic, Literal, Protocol, Self, TypeVar

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.lookup import InstanceReporter, LookupClient
from lmcache_core.p2p import (
    BrokerClient,
    LeaseListener,
    Peer,
    PeerFigures,
    PeerRegistration,
    TierFigures,
    distributed_url_of,
)
from lmcache_core.p2p.messages import tier_figures
from lmcache_core.security import ClientTls, TlsFiles, TokenFile, client_context
from lmcache_core.storage import DiskBackend, LocalCPUBackend
from lmcache_core.storage.announcer import TierAnnouncer
from lmcache_core.storage.pin_board import PinBoard
from lmcache_core.storage.stack import TierStack
from lmcache_core.storage.tiers import DiskSpec, TierSet
from lmcache_core.telemetry import Counters
from lmcache_core.wire.server import LmServer
from lmcache_servicekit.errors import ConflictError
from lmcache_servicekit.listening import naming_listener
from lmcache_servicekit.state import ServiceState

from lmcache_node.collectors import CounterCollector, Described, TierCollector
from lmcache_node.drain import ChunkHandover, NodeDrain
from lmcache_node.settings import NodeSettings

CLIENT_TIMEOUT_S = 1.0
PIN_CHECK_S = 1.0


class Part(Protocol):
    """A part that is opened before use. Closing it after a failed `open` is allowed."""

    async def open(self) -> None:
        """Start working."""

    async def close(self) -> None:
        """Stop; idempotent."""


P = TypeVar("P", bound=Part)
S = TypeVar("S", bound=NodeSettings)


class Node(ABC, Generic[S]):
    """A service that stores chunks. `async with` opens its parts and closes them in reverse,
    including those that were open when a later one failed.

    A subclass implements `open`: it calls the steps below in this order and inserts its own parts.

    1. `open_clients`: lookup and broker can be asked.
    2. `open_tiers`: chunks can be stored; pins expire.
    3. `make_drain`: shutdown is possible before anything new is accepted.
    4. `serve`: others reach the chunks over lm://.
    5. `join`: register with lookup and broker, without waiting for either.
    6. `drain_at_stop`: shutdown begins with the drain.

    Args:
        settings: The settings in `state`, with their type.

    Attributes:
        lookup: Lookup's client; None without a lookup_url.
        broker: The broker's client; None without a broker_url.
        tasks: Owns background work; ends before the tiers are closed.
        announcer: Announces to lookup what tiers gain and lose.
        tiers: All tiers, by kind.
        stack: The tiers as one store.
        local_tiers: The bare tiers that keep chunks in this process.
        pins: Chunks that operators keep in memory.
        distributed_url: Address at which others reach this node's lm://.
        reporter: Reports to lookup; None without a lookup_url.
        registration: The lease at the broker; None without a broker_url.
        started_at: On the monotonic clock.
    """

    tiers: TierSet
    stack: TierStack
    local_tiers: tuple[LocalCPUBackend | DiskBackend, ...]
    pins: PinBoard
    drain: NodeDrain
    lm_server: LmServer

    def __init__(
        self, state: ServiceState, settings: S, kind: Literal["sidecar", "storage"]
    ) -> None:
        self.state = state
        self.settings = settings
        self.started_at = time.monotonic()
        self.exits = AsyncExitStack()
        self.tasks = TaskSupervisor(kind)
        self.counters = Counters()
        self.announcer = TierAnnouncer(settings.tenant, only_own=settings.only_tenant is not None)
        self.token = shown_token(self.settings.service_token_file)
        self.tls = client_tls(self.settings)
        self.lookup: LookupClient | None = None
        self.broker: BrokerClient | None = None
        self.distributed_url = ""
        self.reporter: InstanceReporter | None = None
        self.registration: PeerRegistration | None = None
        self._kind = kind

    @abstractmethod
    async def open(self) -> None:
        """Open all parts, in the order above."""

    @abstractmethod
    def refuse_stores(self) -> None:
        """Accept no new chunks from clients: the drain begins."""

    @abstractmethod
    def accept_stores(self) -> None:
        """Accept new chunks again: the drain was cancelled."""

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.exits.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.exits.aclose()

    async def opened(self, part: P) -> P:
        """Open a part, and close it at the end even if opening it fails."""
        self.exits.push_async_callback(part.close)
        await part.open()
        return part

    async def open_clients(self) -> None:
        """Create the clients of lookup and broker, if the settings name them."""
        settings, tls = self.settings, self.tls.context
        if settings.lookup_url is not None:
            self.lookup = await self.opened(
                LookupClient(settings.lookup_url, self.token, CLIENT_TIMEOUT_S, tls=tls)
            )
        if settings.broker_url is not None:
            self.broker = await self.opened(
                BrokerClient(settings.broker_url, self.token, CLIENT_TIMEOUT_S, tls=tls)
            )

    async def open_tiers(
        self,
        tiers: TierSet,
        described: Mapping[str, Described],
        *,
        pending_bytes: Mapping[str, int] = MappingProxyType({}),
        drain_s: float = 0.0,
    ) -> None:
        """Open the tiers and export their figures.

        Args:
            tiers: Tiers, not opened yet.
            pending_bytes: See `TierStack`.
            drain_s: How long pending writes may take when the tiers are closed.
        """
        self.tiers, self.local_tiers = tiers, tiers.local
        self.stack = stack = tiers.stack(self.announcer, pending_bytes=pending_bytes)
        self.exits.push_async_callback(stack.close, drain_s)
        await stack.open()
        self.state.registry.register(CounterCollector(self.counters, described))
        self.state.registry.register(TierCollector(stack.stats))
        self.exits.push_async_callback(self.tasks.close)
        arena_bytes = stack.hot.stats()["capacity_bytes"]
        self.pins = PinBoard(stack, arena_bytes, self.settings.tier_timeout_s)
        self.exits.callback(self.pins.close)
        self.tasks.repeat("pins", self.pins.expire, PIN_CHECK_S)

    def make_drain(self, handover: ChunkHandover) -> None:
        """Prepare the drain; once it begins, nothing new is accepted, pinned or sent here."""
        self.drain = NodeDrain(
            self.settings.drain_timeout_s, self.stack, handover, self._leave, self._come_back
        )

    async def serve(self, server: LmServer, advertised_url: str | None, grace_s: float = 0) -> None:
        """Listen for lm://.

        Args:
            server: Server with the host and port of the settings.
            advertised_url: Address at which others reach it; None: the address that it listens on.
            grace_s: How long requests in flight may continue at shutdown.

        Raises:
            ConfigError: The address is taken, or belongs to another machine.
        """
        settings = self.settings
        self.lm_server = server
        self.exits.push_async_callback(server.close, grace_s)
        with naming_listener("lm_host", settings.lm_host, "lm_port", settings.lm_port):
            await server.open(self.state.tls, self.state.tracer)
        self.state.ports["lm_port"] = server.port
        self.distributed_url = advertised_url or distributed_url_of(
            settings.lm_host, server.port, self.state.tls is not None
        )

    async def join(
        self,
        figures: Callable[[], PeerFigures],
        listener: LeaseListener | None = None,
        load: Callable[[], float] | None = None,
    ) -> None:
        """Register with lookup and broker, in the background.

        Args:
            figures: Called before each heartbeat: counters of the node and what it holds.
            load: Called before each heartbeat: 0 (idle) to 1; None: always idle.
        """
        settings = self.settings
        if self.lookup is not None:
            self.reporter = InstanceReporter(
                self.lookup, settings.instance_id, self._kind, self.announcer.snapshot
            )
            self.announcer.connect(self.reporter, self.local_tiers)
            await self.opened(self.reporter)
        for tier in self.local_tiers:
            if isinstance(tier, DiskBackend):
                self.tasks.start("announce-disk", self.announcer.announce_when_loaded(tier))
        if self.broker is not None:
            peer = Peer(
                settings.instance_id,
                time.time_ns(),
                self.distributed_url,
                self._kind,
                settings.zone,
                settings.node,
            )
            self.registration = PeerRegistration(
                self.broker,
                peer,
                *([] if load is None else [load]),
                listener=listener,
                figures=figures,
            )
            await self.opened(self.registration)

    def drain_at_stop(self, *, before_stop: bool, at_exit: bool) -> None:
        """Drain when the service shuts down, before any part is closed.

        Args:
            before_stop: On SIGTERM, while requests are still answered.
            at_exit: When this node is closed, for any reason.
        """
        self.exits.push_async_callback(self.drain.close)
        if at_exit:
            self.exits.push_async_callback(self.drain.run_last)
        if before_stop:
            self.state.before_stop.append(self.drain.run_last)

    def tier_figures(self) -> tuple[TierFigures, ...]:
        """Return the fill levels of the local tiers, as sent in heartbeats."""
        return tier_figures({tier.name: tier.stats() for tier in self.local_tiers})

    def takes_chunks(self) -> bool:
        """Return whether new chunks are accepted: no drain has begun."""
        return not self.drain.has_begun

    @property
    def is_draining(self) -> bool:
        """Return whether a drain has begun here, or the broker assigns no pulls to this node."""
        registration = self.registration
        return self.drain.has_begun or (registration is not None and registration.draining)

    @property
    def is_settled(self) -> bool:
        """Return whether everything stored has reached the slower tiers and lookup."""
        return not self.stack.is_writing and (self.reporter is None or self.reporter.synced)

    async def undrain(self) -> None:
        """Accept chunks and pulls again after a drain, or after the broker has ordered one, even
        if the order has not arrived yet.

        Raises:
            ConflictError: The process ends.
        """
        if self.registration is not None and not self.drain.has_begun:
            self.registration.undrain()
        await self.drain.cancel()
        if self.drain.is_last:
            raise ConflictError("this process is about to end: its drain cannot be cancelled")

    def _leave(self) -> None:
        self.refuse_stores()
        self.pins.close()
        if self.registration is not None:
            self.registration.drain()

    def _come_back(self) -> None:
        self.accept_stores()
        self.pins.open()
        if self.registration is not None:
            self.registration.undrain()


def disk_spec(settings: NodeSettings, serde: str | None = None) -> DiskSpec | None:
    """Describe the disk tier in the settings; None if they have none."""
    if settings.disk_path is None:
        return None
    return DiskSpec(
        path=settings.disk_path,
        capacity_bytes=settings.disk_bytes,
        limits=settings.disk_limits,
        fsync=settings.disk_fsync,
        serde=serde,
    )


def shown_token(path: Path | None) -> TokenFile | None:
    """Return the token in `service_token_file`, re-read when it changes.

    Raises:
        ConfigError: The file cannot be read or contains no token.
    """
    return None if path is None else TokenFile(path, "service_token_file")


def check_outgoing(settings: NodeSettings) -> None:
    """Check the files for outgoing connections before the service starts, so that its log ends with
    the error.

    Raises:
        ConfigError: See `shown_token` and `client_tls`, which read the files for use.
    """
    shown_token(settings.service_token_file)
    client_tls(settings)


def client_tls(settings: NodeSettings) -> ClientTls:
    """Return the context for `https://` and `lm+tls://`, reloaded when the files change.

    A service that encrypts, or has authorities configured, shows its token only to encrypted peers.

    Raises:
        ConfigError: A file cannot be read or does not match.
    """
    context = client_context(
        TlsFiles.of(settings, "tls_client_cert_file", "tls_client_key_file", "tls_ca_file")
    )
    return ClientTls(
        context, settings.tls_peer_name, bool(settings.tls_cert_file or settings.tls_ca_file)
    )
