"""What routes ask for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from lmcache_core.p2p.messages import MAX_COPIES_PER_LEASE
from lmcache_core.security import Principal

from lmcache_broker.overview.service import Overview
from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.peers.schemas import CopyView
from lmcache_broker.settings import BrokerSettings
from lmcache_broker.transfers.desk import TransferDesk
from lmcache_broker.transfers.hot import HotChunks


@dataclass(frozen=True, slots=True)
class BrokerParts:
    """The parts of one broker; they live as long as its app."""

    settings: BrokerSettings
    registry: PeerRegistry
    desk: TransferDesk
    hot: HotChunks
    overview: Overview

    async def copies_for(self, principal: Principal, peer_id: str) -> list[CopyView]:
        """What a peer is to copy to others, as this broker and the others want it; it is told
        once.
        """
        orders = self.hot.orders_for(principal, peer_id, time.monotonic())
        orders += await self.registry.take_orders(principal.tenant, peer_id)
        return [CopyView.model_validate(order) for order in orders[:MAX_COPIES_PER_LEASE]]


async def broker_parts(request: Request) -> BrokerParts:
    """The running broker."""
    parts = request.app.state.broker
    assert isinstance(parts, BrokerParts)
    return parts


Parts = Annotated[BrokerParts, Depends(broker_parts)]
