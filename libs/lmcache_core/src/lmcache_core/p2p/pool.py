"""Connections to peers, one each, the least recently used given up first."""

from __future__ import annotations

from collections import OrderedDict

from lmcache_core.p2p.distributed_url import parse_distributed_url
from lmcache_core.wire.capabilities import ONLY_LOSSLESS, Accepts
from lmcache_core.wire.client import ClientOptions, LmClient

MAX_PEERS = 128


class PeerPool:
    """Clients by distributed URL.

    Args:
        name: This instance, for the peers' logs.
        tier: Name that chunks from peers carry.
        timeout_s: Deadline of a call.
        connect_timeout_s: Deadline of connecting; a dead peer costs at most this once per back-off interval.
        accepts: Which records peers may send.
    """

    def __init__(self, name: str, tier: str, timeout_s: float, connect_timeout_s: float = 0.5, accepts: Accepts = ONLY_LOSSLESS) -> None:
        self._options = ClientOptions(timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, name=name, tier=tier, accepts=accepts)
        self._clients: OrderedDict[str, LmClient] = OrderedDict()

    async def client(self, distributed_url: str) -> LmClient:
        """The client of that peer; connects when first used.

        Raises:
            ValueError: Not a distributed URL.
        """
        client = self._clients.get(distributed_url)
        if client is None:
            host, port = parse_distributed_url(distributed_url)
            client = self._clients[distributed_url] = LmClient(host, port, None, self._options)
        self._clients.move_to_end(distributed_url)
        if len(self._clients) > MAX_PEERS:
            _, oldest = self._clients.popitem(last=False)
            await oldest.close()
        return client

    async def close(self) -> None:
        """End every connection. Idempotent."""
        while self._clients:
            _, client = self._clients.popitem()
            await client.close()
