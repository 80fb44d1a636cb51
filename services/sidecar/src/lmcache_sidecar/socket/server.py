"""Accepts clients on the Unix socket; one session each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from lmcache_core.concurrency.supervisor import take_turns
from lmcache_core.errors import ConfigError
from lmcache_core.storage.staging import SWEEP_INTERVAL_S
from lmcache_core.wire.listener import FrameListener, socket_path_problem
from lmcache_core.wire.stream import FrameStream

from lmcache_sidecar import metrics
from lmcache_sidecar.socket.context import SessionContext
from lmcache_sidecar.socket.session import EngineSession

logger = logging.getLogger(__name__)

MAX_CLIENTS = 256
SOCKET_MODE = 0o660


class SocketServer:
    """Listens on a Unix socket.

    Args:
        path: Path of the socket. A stale socket without a listener is replaced; one in use is an
            error.
    """

    def __init__(self, path: Path, context: SessionContext) -> None:
        self._path = path
        self.context = context
        self._listener = FrameListener(
            "sidecar socket",
            MAX_CLIENTS,
            lambda stream: EngineSession(stream, context),
            self._turn_away,
        )
        self._inode = 0

    @property
    def sessions(self) -> list[EngineSession]:
        """Return the connected clients."""
        return [each for each in self._listener.sessions if isinstance(each, EngineSession)]

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: Another sidecar listens there, or the path is unusable.
        """
        if problem := socket_path_problem(self._path):
            raise ConfigError(f"socket_path={str(self._path)!r} {problem}; choose another path")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            await self._replace_dead_socket()
            await self._listener.listen_unix(self._path)
            self._path.chmod(SOCKET_MODE)
            self._inode = self._path.stat().st_ino
        except OSError as exc:
            raise ConfigError(
                f"socket_path={str(self._path)!r}: {exc.strerror or exc}; choose another path"
            ) from exc
        logger.info("listening for engines: socket_path=%s", self._path)
        self.context.tasks.repeat("stage-leases", self._expire_tickets, SWEEP_INTERVAL_S)

    def refuse_stores(self) -> None:
        """Refuse every reservation and lift nothing for tickets: the sidecar is draining."""
        self._set_draining(True)

    def accept_stores(self) -> None:
        """Take reservations and lift again: the drain was cancelled."""
        self._set_draining(False)

    def _set_draining(self, is_draining: bool) -> None:
        self.context.is_draining = is_draining
        for session in self.sessions:
            session.staging.may_lift = not is_draining

    async def close(self) -> None:
        """Stop listening and end every session. Idempotent."""
        await self._listener.close()
        await take_turns(1)  # aborted connections close their sockets in the loop's next turn
        inode, self._inode = self._inode, 0
        if not inode:  # it never listened
            return
        with contextlib.suppress(FileNotFoundError):
            # A different inode is the socket of a sidecar that has taken over.
            if self._path.lstat().st_ino == inode:
                self._path.unlink()

    async def _expire_tickets(self) -> None:
        for session in self.sessions:
            await session.staging.run_cooperatively(session.staging.expire())

    async def _replace_dead_socket(self) -> None:
        try:
            _, writer = await asyncio.open_unix_connection(str(self._path))
        except (ConnectionRefusedError, FileNotFoundError):
            self._path.unlink(missing_ok=True)
            return
        writer.close()
        raise ConfigError(
            f"socket_path={str(self._path)!r}: another sidecar listens there; stop it or choose"
            " another path"
        )

    def _turn_away(self, stream: FrameStream) -> None:
        self.context.log.log(
            logging.WARNING,
            "client of the socket turned away, too many are connected: num_connections=%d",
            self._listener.num_connections,
        )
        self.context.counters.add(metrics.REFUSED_CLIENTS_TOTAL, 1, metrics.TOO_MANY)
