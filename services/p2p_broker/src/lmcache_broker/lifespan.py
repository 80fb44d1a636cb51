"""Opens the broker's parts. All of them live in memory: there is nothing to close."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from lmcache_core.security import TicketSigner
from lmcache_servicekit.state import service_state

from lmcache_broker.dependencies import BrokerParts
from lmcache_broker.metrics import BrokerCollector
from lmcache_broker.peers.service import PeerDirectory, PeerLimits
from lmcache_broker.settings import BrokerSettings
from lmcache_broker.transfers.service import TransferService

logger = logging.getLogger(__name__)


def create_lifespan(settings: BrokerSettings, ticket_keys: Mapping[str, bytes]) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """The lifespan of a broker that signs with the first of `ticket_keys`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if settings.ticket_keys is None and settings.ticket_keys_file is None:
            logger.warning("no ticket keys are set: peers that check tickets will refuse those of this broker")
        directory = PeerDirectory(PeerLimits(settings.max_peers, settings.max_peers_per_tenant, settings.max_lease_ttl_ms))
        signer = TicketSigner(ticket_keys, active=next(iter(ticket_keys)))
        transfers = TransferService(directory, signer, max_pulls=settings.max_pulls_per_peer, ticket_ttl_ms=settings.ticket_ttl_ms)
        service_state(app).registry.register(BrokerCollector(directory, transfers))
        app.state.broker = BrokerParts(settings, directory, transfers)
        yield

    return lifespan
