"""The broker's app: its parts, opened and closed."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from fastapi import FastAPI
from lmcache_core.addresses import is_loopback
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.security import TicketKeys, TicketSigner
from lmcache_servicekit.app import create_service_app
from lmcache_servicekit.logs import create_log_router
from lmcache_servicekit.redis_client import RedisAccess
from lmcache_servicekit.redis_cluster import create_redis_client
from lmcache_servicekit.state import service_state

from lmcache_broker.discovery.discovery import create_discovery
from lmcache_broker.metrics import BrokerCollector
from lmcache_broker.overview import BrokerOverview
from lmcache_broker.page import create_page_router
from lmcache_broker.peers.directory import PeerDirectory, PeerLimits
from lmcache_broker.peers.redis_peers import MAX_CONNECTIONS, RedisPeers
from lmcache_broker.peers.registry import REFRESH_INTERVAL_S, PeerRegistry
from lmcache_broker.routes import ROUTERS, BrokerParts, bodies
from lmcache_broker.settings import BrokerSettings, load_ticket_keys
from lmcache_broker.transfers.hot import HotChunks, HotLimits
from lmcache_broker.transfers.scheduler import TransferScheduler

logger = logging.getLogger(__name__)


def create_lifespan(
    settings: BrokerSettings, ticket_keys: TicketKeys
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return the lifespan of a broker that signs with the first of `ticket_keys`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if settings.ticket_keys is None and settings.ticket_keys_file is None:
            logger.log(
                logging.INFO if is_loopback(settings.host) else logging.WARNING,
                "no ticket keys are set: peers that check tickets will refuse those of this broker;"
                " set ticket_keys_file",
            )
        shared = create_shared_peers(settings)
        registry = PeerRegistry(
            PeerDirectory(
                PeerLimits(
                    settings.max_peers, settings.max_peers_per_tenant, settings.max_lease_ttl_ms
                )
            ),
            shared,
        )
        hot = HotChunks(
            registry.directory, HotLimits(settings.hot_chunk_pulls, settings.hot_chunk_copies)
        )
        scheduler = TransferScheduler(
            registry,
            TicketSigner(ticket_keys),
            max_pulls=settings.max_pulls_per_peer,
            ticket_ttl_ms=settings.ticket_ttl_ms,
            hot=hot,
        )
        state = service_state(app)
        overview = BrokerOverview(settings, app.version, registry, hot)
        app.state.broker = BrokerParts(settings, registry, scheduler, hot, overview)
        tasks = TaskSupervisor("broker")
        if settings.redis_url is not None:
            assert shared is not None
            timeout_s = settings.redis_timeout_ms / 1000
            state.health.add(
                "redis", registry.ping, timeout_s=timeout_s, required=False, where=shared.where
            )
        discovery = await create_discovery(settings, registry)
        state.registry.register(BrokerCollector(registry, scheduler, hot, discovery))
        await scheduler.open()
        try:
            tasks.repeat("sample", overview.sample, settings.history_interval_s)
            if settings.redis_url is not None:
                tasks.repeat("refresh", registry.refresh, REFRESH_INTERVAL_S)
            if discovery is not None:
                await discovery.open()
                if discovery.watch is not None:
                    state.health.add("kubernetes", discovery.watch.ping, required=False)
            yield
        finally:
            if discovery is not None:
                await discovery.close()
            await scheduler.close()
            await tasks.close()
            await registry.close()

    return lifespan


def create_shared_peers(settings: BrokerSettings) -> RedisPeers | None:
    """Return the peer store that the settings share between brokers; None without one. Connects to
    nothing.

    Raises:
        ConfigError: The URL, a file for TLS, or the password of the sentinels cannot be read.
    """
    access = RedisAccess.of(settings)
    if access is None:
        return None
    timeout_s = settings.redis_timeout_ms / 1000
    return RedisPeers(create_redis_client(access, timeout_s, MAX_CONNECTIONS), timeout_s)


# 4096 chunks with 16 holders of the longest names fit.
_MAX_BODY_BYTES: Final = {"": 64 << 10, "/v1/transfers": 12 << 20}


def create_app(settings: BrokerSettings) -> FastAPI:
    """Build the app. Reads the token file and the key file.

    Raises:
        ConfigError: One of them cannot be read or is wrong.
    """
    app = create_service_app(
        settings,
        "lmcache-broker",
        lifespan=create_lifespan(settings, load_ticket_keys(settings)),
        routers=[*ROUTERS, create_log_router()],
        max_body_bytes=_MAX_BODY_BYTES,
        page=create_page_router(),
    )
    app.describe(bodies.schemas())
    return app
