"""Opens and closes the broker's parts."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.security import TicketKeys, TicketSigner
from lmcache_servicekit.redis_client import create_redis_client
from lmcache_servicekit.redis_connections import RedisAccess
from lmcache_servicekit.state import service_state

from lmcache_broker.dependencies import BrokerParts
from lmcache_broker.discovery import create_discovery
from lmcache_broker.metrics import BrokerCollector, DiscoveryCollector
from lmcache_broker.overview.service import Overview
from lmcache_broker.peers.redis_peers import MAX_CONNECTIONS, RedisPeers
from lmcache_broker.peers.registry import REFRESH_INTERVAL_S, PeerRegistry
from lmcache_broker.peers.service import PeerDirectory, PeerLimits
from lmcache_broker.settings import BrokerSettings
from lmcache_broker.transfers.desk import TransferDesk
from lmcache_broker.transfers.hot import HotChunks, HotLimits
from lmcache_broker.transfers.service import TransferLimits, TransferService

logger = logging.getLogger(__name__)


def create_lifespan(
    settings: BrokerSettings, ticket_keys: TicketKeys
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """The lifespan of a broker that signs with the first of `ticket_keys`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if settings.ticket_keys is None and settings.ticket_keys_file is None:
            logger.warning(
                "no ticket keys are set: peers that check tickets will refuse those of this broker"
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
        signer = TicketSigner(ticket_keys)
        transfers = TransferService(
            registry, signer, TransferLimits(settings.max_pulls_per_peer, settings.ticket_ttl_ms)
        )
        hot = HotChunks(
            registry.directory, HotLimits(settings.hot_chunk_pulls, settings.hot_chunk_copies)
        )
        desk = TransferDesk(transfers, hot)
        state = service_state(app)
        state.registry.register(BrokerCollector(registry, desk, transfers.figures, hot))
        overview = Overview(settings.instance_id, registry, hot, settings.history_interval_s)
        app.state.broker = BrokerParts(settings, registry, desk, hot, overview)
        tasks = TaskSupervisor("broker")
        if settings.redis_url is not None:
            assert shared is not None
            timeout_s = settings.redis_timeout_ms / 1000
            state.health.add(
                "redis", registry.ping, timeout_s=timeout_s, required=False, where=shared.where
            )
        discovering = await create_discovery(settings, registry)
        state.registry.register(DiscoveryCollector(discovering))
        await desk.open()
        try:
            tasks.repeat("sample", overview.sample, settings.history_interval_s)
            if settings.redis_url is not None:
                tasks.repeat("refresh", registry.keep_fresh, REFRESH_INTERVAL_S)
            if discovering is not None:
                await discovering.open()
                if discovering.watch is not None:
                    state.health.add("kubernetes", discovering.watch.ping, required=False)
            yield
        finally:
            if discovering is not None:
                await discovering.close()
            await desk.close()
            await tasks.close()
            await registry.close()

    return lifespan


def create_shared_peers(settings: BrokerSettings) -> RedisPeers | None:
    """What brokers share, as the settings say; None where this one is alone. Connects to nothing.

    Raises:
        ConfigError: The URL, a file for TLS, or the password of the sentinels cannot be read.
    """
    access = RedisAccess.of(settings)
    if access is None:
        return None
    timeout_s = settings.redis_timeout_ms / 1000
    return RedisPeers(create_redis_client(access, timeout_s, MAX_CONNECTIONS), timeout_s)
