"""What routes ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from lmcache_broker.peers.registry import PeerRegistry
from lmcache_broker.settings import BrokerSettings
from lmcache_broker.transfers.desk import TransferDesk


@dataclass(frozen=True, slots=True)
class BrokerParts:
    """The parts of one broker; they live as long as its app."""

    settings: BrokerSettings
    registry: PeerRegistry
    desk: TransferDesk


def broker_parts(request: Request) -> BrokerParts:
    """The running broker."""
    parts = request.app.state.broker
    assert isinstance(parts, BrokerParts)
    return parts


Parts = Annotated[BrokerParts, Depends(broker_parts)]
