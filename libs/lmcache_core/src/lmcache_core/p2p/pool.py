"""Connections to peers, one each; the least recently used is closed first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from typing import Final

from lmcache_core.errors import UnavailableError
from lmcache_core.p2p.distributed_url import is_encrypted, parse_distributed_url
from lmcache_core.security import ClientTls, ShownToken, client_context
from lmcache_core.wire.capabilities import ONLY_LOSSLESS, Accepts
from lmcache_core.wire.client import ClientOptions, LmClient

MAX_PEERS: Final = 128
SUSPECT_S: Final = 2.0
"""How long a peer that has stalled is not asked: a stopped process accepts connections and never
answers.
"""


def peer_client(distributed_url: str, token: ShownToken, options: ClientOptions) -> LmClient:
    """Return the client of a peer, encrypted if and only if its URL says so.

    Args:
        token: Token to present. Anyone who may announce a peer could receive it, so if
            `options.tls` requires it, only peers with a verified certificate get it.
        options: Options, whose `tls` applies to encrypted peers; None: the system's authorities.

    Raises:
        ValueError: `distributed_url` is malformed.
    """
    host, port = parse_distributed_url(distributed_url)
    if is_encrypted(distributed_url):
        return LmClient(
            host, port, token, replace(options, tls=options.tls or ClientTls(client_context()))
        )
    is_hidden = options.tls is not None and options.tls.only_encrypted
    return LmClient(host, port, None if is_hidden else token, replace(options, tls=None))


class PeerPool:
    """Clients by distributed URL.

    Args:
        name: Name of this instance in the peers' logs.
        tier: Name of the tier that chunks from peers are attributed to.
        connect_timeout_s: Deadline of connecting; a dead peer costs at most this once per back-off
            interval.
        tls: Trusted authorities and client certificate for encrypted peers; None: the system's
            authorities.

    Attributes:
        timeout_s: Deadline of a call without its own.
    """

    def __init__(
        self,
        name: str,
        tier: str,
        timeout_s: float,
        connect_timeout_s: float = 0.5,
        accepts: Accepts = ONLY_LOSSLESS,
        tls: ClientTls | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._options = ClientOptions(
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            name=name,
            tier=tier,
            accepts=accepts,
            tls=tls,
        )
        self._clients: OrderedDict[str, LmClient] = OrderedDict()
        self._suspects: OrderedDict[str, float] = OrderedDict()

    async def client(self, distributed_url: str) -> LmClient:
        """Return the client of that peer, which connects on first use.

        Raises:
            ValueError: `distributed_url` is malformed.
            UnavailableError: The peer has stalled recently.
        """
        if asyncio.get_running_loop().time() < self._suspects.get(distributed_url, 0.0):
            raise UnavailableError(
                f"{distributed_url} has stalled and is not asked again for {SUSPECT_S:g} s"
            )
        client = self._clients.get(distributed_url)
        if client is None:
            client = self._clients[distributed_url] = peer_client(
                distributed_url, None, self._options
            )
        self._clients.move_to_end(distributed_url)
        if len(self._clients) > MAX_PEERS:
            _, oldest = self._clients.popitem(last=False)
            await oldest.close()
        return client

    async def suspect(self, distributed_url: str) -> None:
        """Close the connection to a peer that sends nothing, and do not ask it for a while."""
        self._suspects[distributed_url] = asyncio.get_running_loop().time() + SUSPECT_S
        self._suspects.move_to_end(distributed_url)
        if len(self._suspects) > MAX_PEERS:
            self._suspects.popitem(last=False)
        client = self._clients.pop(distributed_url, None)
        if client is not None:
            await client.close()

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        while self._clients:
            _, client = self._clients.popitem()
            await client.close()
