"""The running sidecar: its parts, and the order in which they open and close."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from lmcache_core.errors import CapacityError, ConfigError, UnavailableError
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory import SharedArena
from lmcache_core.memory.shared import ArenaFile, huge_page_policy
from lmcache_core.mover import Attach, MoverClient
from lmcache_core.names import DISK_TIER, PEER_TIER
from lmcache_core.p2p.by_mover import MoverPulls
from lmcache_core.p2p.pool import PeerPool
from lmcache_core.record import Chunk
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.codecs import Codecs, create_codecs
from lmcache_core.storage.peer import P2PBackend
from lmcache_core.storage.remote.members import locate_by_lookup
from lmcache_core.storage.tiers import HotSpec, PeersSpec, RemoteSpec, TiersSpec, build_tiers
from lmcache_core.wire.capabilities import Accepts
from lmcache_node.collectors import CodecErrorCollector
from lmcache_node.local_chunks import LocalChunks
from lmcache_node.node import Node, disk_spec
from lmcache_node.settings import BYTES_PER_GB
from lmcache_servicekit.settings import read_secret_file
from lmcache_servicekit.state import ServiceState, service_state
from typing_extensions import override

from lmcache_sidecar.arena.owner import ArenaOwner, open_arena
from lmcache_sidecar.descriptions import Descriptions
from lmcache_sidecar.handover.handover import PodHandover
from lmcache_sidecar.handover.replication_requests import BrokerRequests
from lmcache_sidecar.handover.takers import PeerSource, RemoteSource, TakerSource
from lmcache_sidecar.heartbeat import (
    MEASURE_INTERVAL_S,
    ExclusiveBytes,
    OwnLoad,
    heartbeat_figures,
)
from lmcache_sidecar.holders import Holders
from lmcache_sidecar.metrics import DESCRIBED
from lmcache_sidecar.peer_server import create_peer_server
from lmcache_sidecar.recent_lookups import RecentLookups
from lmcache_sidecar.settings import SidecarSettings, make_default_directories
from lmcache_sidecar.socket.context import SessionContext
from lmcache_sidecar.socket.encoded_readers import EncodedReaders
from lmcache_sidecar.socket.server import SocketServer

logger = logging.getLogger(__name__)
wait_before_retry = asyncio.sleep

ARENA_RETRY_S = 1.0


class SidecarNode(Node[SidecarSettings]):
    """A node whose memory tier is shared with the engines of its pod.

    Attributes:
        holders: Finds other holders of chunks; None without lookup.
        mover: Reads from peers and lends to them; None: they exchange chunks over lm:// alone.
    """

    arena_owner: ArenaOwner
    arena: SharedArena
    socket_server: SocketServer
    descriptions: Descriptions
    lookups: RecentLookups
    holders: Holders | None
    mover: MoverClient | None = None

    def __init__(self, state: ServiceState) -> None:
        assert isinstance(state.settings, SidecarSettings)
        super().__init__(state, state.settings, "sidecar")

    @override
    async def open(self) -> None:
        settings, health = self.settings, self.state.health
        make_default_directories(settings)
        salt = read_secret_file(settings.salt_file, "salt_file") or ""
        # Probes are answered while waiting for the arena.
        health.add("arena", _arena_is_not_open)
        self.arena_owner = owner = await self._open_arena()
        self.arena = owner.arena
        logger.info(
            "arena open: size_gb=%.2f huge_pages=%s volume_policy=%s",
            self.arena.size / BYTES_PER_GB,
            "advised" if self.arena.huge_pages else "off",
            huge_page_policy(settings.arena_path),
        )
        self.exits.callback(owner.close)
        if settings.mover_socket is not None:
            arena = Attach(str(self.arena.path), self.arena.size, self.arena.generation)
            self.mover = MoverClient(settings.mover_socket, arena, owner.allocator)
            self.mover.open()
            self.exits.push_async_callback(self.mover.close)
        await self.open_clients()
        options = ("disk_serde", "remote_serde", "peer_serde")
        serdes = {option: getattr(settings, option) for option in options}
        # Codecs compile when they open, so that no request waits for that.
        codecs = await self.opened(create_codecs(serdes, counters=self.counters))
        readers = EncodedReaders(codecs)
        spec = self._describe_tiers(codecs, readers.stays_encoded)
        await self.open_tiers(build_tiers(spec), DESCRIBED)
        if self.tiers.remote is not None:
            self.tasks.start("remote-tier", self._try_remote(self.tiers.remote))
        self.state.registry.register(CodecErrorCollector(codecs.figures.errors))
        self.exits.callback(owner.seal)  # before the tiers are emptied
        context = SessionContext(
            self.stack,
            self.arena,
            settings.instance_id,
            settings.tenant,
            settings.verify_hot,
            salt,
            settings.tier_timeout_s,
            self.tasks,
            self.counters,
            self.announcer.changes,
            owner.journal,
            self.state.tracer,
            readers,
        )
        self.socket_server = SocketServer(settings.socket_path, context)
        self.descriptions, self.lookups = context.descriptions, context.lookups
        self.holders = holders = (
            None if self.lookup is None else Holders(self.lookup, settings.instance_id)
        )
        # Other tenants' chunks on a disk would arrive elsewhere under this tenant's name.
        chunks = LocalChunks(
            self.tiers.hot,
            self.tiers.disk,
            self.tiers.guarded(DISK_TIER),
            settings.tier_timeout_s,
            lambda key: key.tenant == settings.tenant,
        )
        exclusive = None
        if holders is not None:
            exclusive = ExclusiveBytes(chunks, self.tiers.remote, holders, settings.tier_timeout_s)
            self.tasks.repeat("sole-bytes", exclusive.measure, MEASURE_INTERVAL_S)
        requests = self._make_handover(chunks, holders)
        server = create_peer_server(
            settings, self.state, self.stack, codecs, self.takes_handovers, self.counters
        )
        server.lender = self.mover
        await self.serve(server, settings.distributed_url)
        await self.join(
            lambda: heartbeat_figures(
                self.tiers,
                self.counters,
                None if exclusive is None else exclusive.num_bytes,
                self.descriptions.chunk_tokens(),
            ),
            requests,
            OwnLoad(),
        )
        await self.opened(self.socket_server)
        owner.start(self.tasks, self.tiers.hot, self.announcer, self.counters)
        health.add("arena", self._check_arena)
        health.add("lookup-and-broker", self._check_registered, required=False)
        self.drain_at_stop(before_stop=True, at_exit=True)
        self._drain_at_signal()

    @override
    def refuse_stores(self) -> None:
        self.socket_server.refuse_stores()

    @override
    def accept_stores(self) -> None:
        self.socket_server.accept_stores()

    @property
    def is_registered(self) -> bool | None:
        """Return whether lookup and broker know this sidecar; None if neither is configured."""
        if self.reporter is None or self.registration is None:
            return None
        return self.reporter.registered and self.registration.registered

    def takes_handovers(self) -> bool:
        """Return whether peers may currently put chunks here."""
        return self.settings.accept_handover and self.takes_chunks()

    async def _open_arena(self) -> ArenaOwner:
        """Open the arena. A new one may not fit while engines still map the arena of an earlier
        start; then wait for them.

        Raises:
            ConfigError: It still does not fit after `arena_wait_s`.
        """
        settings = self.settings
        size, mode = int(settings.arena_gb * BYTES_PER_GB), int(settings.arena_mode, 8)
        huge_pages = {"auto": None, "off": False, "advise": True}[settings.arena_huge_pages]
        file = ArenaFile(settings.arena_path, size, mode, huge_pages)
        deadline = time.monotonic() + settings.arena_wait_s
        logged = ""
        while True:
            try:
                return await asyncio.to_thread(open_arena, file, settings.arena_recover)
            except CapacityError as exc:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise ConfigError(f"arena_gb={settings.arena_gb:g}: {exc}") from exc
                if str(exc) != logged:
                    logged = str(exc)
                    logger.warning(
                        "waiting for engines to unmap the arena of an earlier start:"
                        " left_s=%.1f error=%s",
                        left_s,
                        exc,
                    )
                await wait_before_retry(min(ARENA_RETRY_S, left_s))

    def _describe_tiers(self, codecs: Codecs, stays_encoded: Callable[[Chunk], bool]) -> TiersSpec:
        """Return the tiers in the settings; peers only if lookup and broker are configured.

        Each has a codec, because other writers may have encoded what is stored there: engines get
        only encodings that were configured.
        """
        settings, owner = self.settings, self.arena_owner
        peers = remote = None
        if self.lookup is not None and self.broker is not None:
            # Peers encode as configured; a received chunk must be one that this sidecar would send.
            accepts = Accepts(codecs.is_lossy(settings.peer_serde), frozenset(codecs.decodable()))
            pool = PeerPool(
                settings.instance_id,
                PEER_TIER,
                settings.tier_timeout_s,
                accepts=accepts,
                tls=self.tls,
            )
            mover = None if self.mover is None else MoverPulls(self.mover, PEER_TIER)
            backend = P2PBackend(settings.instance_id, self.lookup, self.broker, pool, mover)
            peers = PeersSpec(backend=backend, accepts_lossy=accepts.lossy)
        if settings.remote_url is not None:
            remote = RemoteSpec(
                url=settings.remote_url,
                timeout_s=settings.tier_timeout_s,
                token=self.token,
                serde=settings.remote_serde,
                tls=self.tls,
                locate=None if self.lookup is None else partial(locate_by_lookup, self.lookup),
            )
        return TiersSpec(
            hot=HotSpec(
                memory=owner.allocator,
                limits=settings.memory_limits,
                on_kept=None if owner.journal is None else owner.journal.kept,
            ),
            disk=disk_spec(settings, settings.disk_serde),
            peers=peers,
            remote=remote,
            policy=settings.eviction_policy,
            codecs=codecs,
            stays_encoded=stays_encoded,
            removed_from=self.announcer.removed_from,
        )

    def _make_handover(self, chunks: LocalChunks, holders: Holders | None) -> BrokerRequests | None:
        """Create the drain, and the handler of the broker's requests; None without a broker."""
        settings = self.settings
        sources: list[TakerSource] = []
        if self.tiers.remote is not None:
            sources.append(RemoteSource(self.tiers.remote))
        peers = None
        if holders is not None and self.broker is not None:
            peers = PeerSource(
                settings.instance_id,
                self.broker,
                holders,
                self.token,
                settings.tier_timeout_s,
                self.tls,
            )
            sources.append(peers)
        self.make_drain(PodHandover(chunks, sources, self.counters))
        if peers is None:
            return None
        return BrokerRequests(self.drain, chunks, peers.connect, self.tasks, self.counters)

    def _drain_at_signal(self) -> None:
        """Let SIGUSR1 begin the drain without ending the process: a pod's preStop hook needs no
        token.
        """
        if threading.current_thread() is threading.main_thread():  # only it can handle signals
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, self.drain.begin)
            self.exits.callback(loop.remove_signal_handler, signal.SIGUSR1)

    async def _try_remote(self, remote: StorageBackend) -> None:
        """Log if the remote tier does not answer: without requests, nothing else would say so."""
        nothing = CacheEngineKey("", "", 1, 0, "00" * 32)
        try:
            await remote.batched_contains([ChunkKey.of(self.settings.tenant, nothing)])
        except UnavailableError as exc:
            logger.warning("dependency unavailable: check=storage error=%s", exc)

    async def _check_arena(self) -> str:
        path = Path(self.arena.path)
        if not await asyncio.to_thread(path.exists):
            raise ConfigError(f"the arena file {path} is gone; restart the sidecar")
        return f"{self.arena.size} bytes{', huge pages advised' if self.arena.huge_pages else ''}"

    async def _check_registered(self) -> str:
        if self.is_registered is False:
            raise ConfigError("not registered at lookup or broker; peers cannot find this sidecar")
        return "none configured" if self.is_registered is None else "registered"


async def _arena_is_not_open() -> str:
    raise CapacityError("the shared memory is not allocated yet")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Run the sidecar of an app."""
    async with SidecarNode(service_state(app)) as app.state.sidecar:
        yield


async def _sidecar_of(request: Request) -> SidecarNode:
    sidecar = request.app.state.sidecar
    assert isinstance(sidecar, SidecarNode)
    return sidecar


RunningSidecar = Annotated[SidecarNode, Depends(_sidecar_of)]
"""Dependency of routes that need the running sidecar."""
