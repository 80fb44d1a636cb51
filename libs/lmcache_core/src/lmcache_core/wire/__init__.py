"""lm://, the protocol that chunks travel by between sidecars and cache_storage. No torch."""

from lmcache_core.wire.client import DEFAULT_PORT, ClientOptions, LmClient
from lmcache_core.wire.served import (
    AdaptsToClients,
    Authenticate,
    ServedStore,
    ServerLimits,
    VerifyTicket,
)
from lmcache_core.wire.server import LmServer
from lmcache_core.wire.stream import FrameStream

__all__ = [
    "AdaptsToClients",
    "Authenticate",
    "ClientOptions",
    "DEFAULT_PORT",
    "FrameStream",
    "LmClient",
    "LmServer",
    "ServedStore",
    "ServerLimits",
    "VerifyTicket",
]
