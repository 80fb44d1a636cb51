"""Connects an embedded engine to its peers: it pulls what they hold, and serves its own chunks at
its `distributed_url`.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.errors import AuthenticationError, ConfigError, UnavailableError
from lmcache_core.keys import DEFAULT_TENANT, ChunkKey
from lmcache_core.lookup import InstanceReporter, LookupClient
from lmcache_core.names import PEER_TIER
from lmcache_core.p2p import BrokerClient, Peer, PeerRegistration, parse_distributed_url
from lmcache_core.p2p.distributed_url import DistributedUrl, is_encrypted
from lmcache_core.p2p.pool import PeerPool
from lmcache_core.security import (
    ClientTls,
    Principal,
    TicketKeyFile,
    TicketVerifier,
    TlsFiles,
    TokenFile,
    client_context,
    server_context,
)
from lmcache_core.storage.announcer import TierAnnouncer
from lmcache_core.storage.base import OnRemoved
from lmcache_core.storage.codecs import create_codecs
from lmcache_core.storage.disk import DiskBackend
from lmcache_core.storage.peer import P2PBackend
from lmcache_core.storage.remote import Locate
from lmcache_core.storage.remote.members import locate_by_lookup
from lmcache_core.storage.served import EncodingStore, LocalStore
from lmcache_core.storage.stack import TierStack
from lmcache_core.wire.server import LmServer

logger = logging.getLogger(__name__)

CLIENT_TIMEOUT_S: Final = 1.0
RAW: Final = "naive"


class PeerGroup:
    """The peers of an engine. Opened and closed on one event loop, as often as the engine is.

    Args:
        config: Configuration with `enable_p2p` and the options that it requires.

    Attributes:
        announcer: Announces to lookup what the engine's tiers hold.
        locate: Finds the server of a remote tier that holds a chunk; unavailable while the engine
            is closed.

    Raises:
        ConfigError: A file cannot be read, or a URL is malformed.
    """

    def __init__(self, config: LMCacheEngineConfig) -> None:
        assert config.lookup_url is not None, "checked by the config"
        assert config.broker_url is not None, "checked by the config"
        assert config.distributed_url is not None, "checked by the config"
        token = (
            None
            if config.peer_token_file is None
            else TokenFile(Path(config.peer_token_file), "peer_token_file")
        )
        self._url = config.distributed_url
        self._address = _address(self._url)
        self._instance = f"{self._address.host}-{self._address.port}".replace(":", "-")
        self._timeout_s = config.tier_timeout_s
        self._keys = (
            None
            if config.peer_ticket_keys_file is None
            else TicketKeyFile(Path(config.peer_ticket_keys_file), "peer_ticket_keys_file")
        )
        self._client_tls, self._server_tls = _tls(config)
        self._lookup = LookupClient(
            config.lookup_url, token, CLIENT_TIMEOUT_S, tls=self._client_tls.context
        )
        self._broker = BrokerClient(
            config.broker_url, token, CLIENT_TIMEOUT_S, tls=self._client_tls.context
        )
        self.locate: Locate = partial(locate_by_lookup, self._lookup)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exits = AsyncExitStack()
        self._codecs = create_codecs({})
        self.announcer = TierAnnouncer(DEFAULT_TENANT)

    def make_tier(self) -> P2PBackend:
        """Return a new tier that reads from peers."""
        pool = PeerPool(self._instance, PEER_TIER, self._timeout_s, tls=self._client_tls)
        return P2PBackend(self._instance, self._lookup, self._broker, pool)

    def removed_from(self, tier: str) -> OnRemoved:
        """Return the callback that a tier calls, from any thread, with every key it drops."""
        removed = self.announcer.removed_from(tier)

        def soon(key: ChunkKey) -> None:
            loop = self._loop
            if loop is not None:
                with suppress(RuntimeError):  # closed concurrently
                    loop.call_soon_threadsafe(removed, key)

        return soon

    async def open(self, stack: TierStack, disk: DiskBackend | None) -> None:
        """Serve the local tiers of a stack and register, in the background. If the address is
        taken, peers are asked but not served.

        Args:
            stack: An open stack with `announcer` as its listener.
        """
        self._loop = asyncio.get_running_loop()
        for client in (self._lookup, self._broker):
            await client.open()
            self._exits.push_async_callback(client.close)
        verify = None if self._keys is None else TicketVerifier(self._keys, self._instance).verify
        await self._codecs.open()
        self._exits.push_async_callback(self._codecs.close)
        store = EncodingStore(LocalStore(stack, accepts_puts=lambda: False), self._codecs, RAW)
        authenticate = _any_client if verify is None else _refuse_without_ticket
        server = LmServer(
            store,
            authenticate,
            host=self._address.host,
            port=self._address.port,
            verify_ticket=verify,
        )
        try:
            await server.open(self._server_tls)
        except UnavailableError as exc:
            logger.warning("peers are asked but not served: error=%s", exc)
            return
        self._exits.push_async_callback(server.close)
        reporter = InstanceReporter(
            self._lookup, self._instance, "sidecar", self.announcer.snapshot
        )
        self.announcer.connect(reporter, [stack.hot] if disk is None else [stack.hot, disk])
        registration = PeerRegistration(
            self._broker, Peer(self._instance, time.time_ns(), self._url)
        )
        for part in (reporter, registration):
            await part.open()
            self._exits.push_async_callback(part.close)
        if disk is not None:
            tasks = TaskSupervisor("peer-group", max_tasks=1)
            tasks.start("announce-disk", self.announcer.announce_when_loaded(disk))
            self._exits.push_async_callback(tasks.close)

    async def close(self) -> None:
        """Stop serving and end the registration. Idempotent."""
        self._loop = None
        await self._exits.aclose()


def _address(url: str) -> DistributedUrl:
    try:
        return parse_distributed_url(url)
    except ValueError as exc:
        raise ConfigError(f"distributed_url={url!r}: {exc}") from None


def _tls(config: LMCacheEngineConfig) -> tuple[ClientTls, ssl.SSLContext | None]:
    """Return the TLS settings of the client and of the server; None for the server if the URL is
    not encrypted.

    Raises:
        ConfigError: A file cannot be read or does not match.
    """
    identity = "peer_tls_cert_file", "peer_tls_key_file"
    shown = client_context(TlsFiles.of(config, *identity, "peer_tls_ca_file"))
    client = ClientTls(shown, config.peer_tls_name, only_encrypted=True)
    if not is_encrypted(config.distributed_url or ""):
        return client, None
    return client, server_context(TlsFiles.of(config, *identity, "peer_tls_client_ca_file"))


def _any_client(token: str | None) -> Principal:
    """Let every client that reaches the address read: there are no ticket keys, as the config
    allows on loopback only.
    """
    return Principal(DEFAULT_TENANT, "client", "anybody")


def _refuse_without_ticket(token: str | None) -> Principal:
    raise AuthenticationError("this engine serves peers with a broker's ticket only")
