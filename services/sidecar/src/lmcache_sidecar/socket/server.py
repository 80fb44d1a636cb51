"""Accepts clients on the Unix socket; one session each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from lmcache_core.errors import ConfigError, ProtocolError
from lmcache_core.sidecar import messages as m

from lmcache_sidecar.socket.session import Session, SessionContext

logger = logging.getLogger(__name__)

MAX_CLIENTS = 256
SOCKET_MODE = 0o660
MAX_SOCKET_PATH_BYTES = 107


class SocketServer:
    """Listens on a Unix socket.

    Args:
        path: Where; a socket that nobody listens on any more is replaced, one in use is an error.
        context: What sessions share.
    """

    def __init__(self, path: Path, context: SessionContext) -> None:
        self._path = path
        self._context = context
        self._server: asyncio.Server | None = None
        self._sessions: dict[Session, asyncio.Task[None]] = {}
        self._is_draining = False

    @property
    def sessions(self) -> list[Session]:
        """Clients that are connected now."""
        return list(self._sessions)

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: Another sidecar listens there, or the path cannot be used.
        """
        if len(str(self._path).encode()) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"socket_path={str(self._path)!r} is longer than {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter one")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            await self._replace_dead_socket()
        try:
            self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        except OSError as exc:
            raise ConfigError(f"socket_path={str(self._path)!r}: {exc.strerror or exc}") from exc
        self._path.chmod(SOCKET_MODE)

    def refuse_stores(self) -> None:
        """From now on no client can store: the sidecar is draining."""
        self._is_draining = True
        for session in self._sessions:
            session.refuse_stores()

    async def close(self) -> None:
        """Stop listening and end every session. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        tasks = list(self._sessions.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
        self._path.unlink(missing_ok=True)

    async def _replace_dead_socket(self) -> None:
        try:
            _, writer = await asyncio.open_unix_connection(str(self._path))
        except (ConnectionRefusedError, FileNotFoundError):
            self._path.unlink(missing_ok=True)
            return
        except OSError as exc:
            raise ConfigError(f"socket_path={str(self._path)!r}: {exc.strerror or exc}") from exc
        writer.close()
        raise ConfigError(f"socket_path={str(self._path)!r}: another sidecar listens there; stop it or choose another path")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if len(self._sessions) >= MAX_CLIENTS or task is None:
            writer.close()
            return
        session = Session(self._context)
        if self._is_draining:
            session.refuse_stores()
        self._sessions[session] = task
        try:
            await self._converse(session, reader, writer)
        except ProtocolError as exc:
            logger.warning("closing a client of the socket: %s", exc)
            with contextlib.suppress(ConnectionError):
                writer.write(m.encode(m.Refused("protocol", str(exc)[:512])))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            logger.debug("a client of the socket went away")
        finally:
            del self._sessions[session]
            session.close()
            writer.close()

    async def _converse(self, session: Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            (length,) = m.LENGTH.unpack(await reader.readexactly(m.LENGTH.size))
            m.check_length(length)
            request = m.decode_request(await reader.readexactly(length))
            writer.write(m.encode(await session.answer(request)))
            await writer.drain()
