"""The Unix socket on which the serving processes of the pod reach the sidecar."""

from lmcache_sidecar.socket.context import SessionContext
from lmcache_sidecar.socket.server import SocketServer
from lmcache_sidecar.socket.session import EngineSession

__all__ = ["EngineSession", "SessionContext", "SocketServer"]
