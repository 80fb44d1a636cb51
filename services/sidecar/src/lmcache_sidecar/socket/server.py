"""Accepts clients on the Unix socket; one session each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import stat
from pathlib import Path

from lmcache_core.concurrency.supervisor import CANCEL_WAIT_S, stop_listening, take_turns
from lmcache_core.errors import ConfigError, ProtocolError
from lmcache_core.sidecar import messages as m
from lmcache_core.storage.staging import SWEEP_INTERVAL_S
from lmcache_core.telemetry.request_context import Carried, RequestIds, working_for
from lmcache_core.telemetry.sparse_log import SparseLog

from lmcache_sidecar import metrics
from lmcache_sidecar.socket.context import SessionContext, SharedState
from lmcache_sidecar.socket.requests import Requests
from lmcache_sidecar.socket.session import EngineSession

logger = logging.getLogger(__name__)

MAX_CLIENTS = 256
SOCKET_MODE = 0o660
MAX_SOCKET_PATH_BYTES = 107
HELLO_TIMEOUT_S = 5.0
DISCARD_BYTES = 64 << 10


class SocketServer:
    """Listens on a Unix socket.

    Args:
        path: Where; a socket that nobody listens on any more is replaced, one in use is an error.
        context: What sessions share.
    """

    def __init__(self, path: Path, context: SessionContext) -> None:
        self._path = path
        self._context = context
        self._ids = RequestIds()
        self._shared = SharedState(context.tenant, context.arena.size)
        self._requests = Requests(context.counters)
        self._log = SparseLog(logger)
        self._server: asyncio.Server | None = None
        self._sessions: set[EngineSession] = set()
        self._connections: dict[
            asyncio.Task[None], asyncio.StreamWriter
        ] = {}  # also those whose session has not begun
        self._is_draining = False
        self._is_closed = False
        self._inode = 0

    @property
    def sessions(self) -> list[EngineSession]:
        """Clients that are connected now."""
        return list(self._sessions)

    @property
    def staged_bytes(self) -> int:
        """Bytes of the arena that tickets of all clients hold."""
        return self._shared.room.used_bytes

    async def open(self) -> None:
        """Listen.

        Raises:
            ConfigError: Another sidecar listens there, or the path cannot be used.
        """
        if len(str(self._path).encode()) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"socket_path={str(self._path)!r} is longer than {MAX_SOCKET_PATH_BYTES} bytes;"
                " choose a shorter one"
            )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            await self._replace_dead_socket()
            self._server = await asyncio.start_unix_server(self._accept, str(self._path))
            self._path.chmod(SOCKET_MODE)
            self._inode = self._path.stat().st_ino
        except OSError as exc:
            raise ConfigError(
                f"socket_path={str(self._path)!r}: {exc.strerror or exc}; choose another path"
            ) from exc
        logger.info("engines reach this sidecar by the socket %s", self._path)
        self._context.tasks.repeat("stage-leases", self._expire_tickets, SWEEP_INTERVAL_S)

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
        self._is_closed = True
        await stop_listening(server)
        for session in self._sessions:
            session.abandon()
        connections = dict(self._connections)
        for task in connections:
            task.cancel()
        if connections:
            _, left = await asyncio.wait(connections, timeout=CANCEL_WAIT_S)
            if left:
                logger.error(
                    "sessions ignored their cancellation, leaving them: sessions=%d waited_s=%g",
                    len(left),
                    CANCEL_WAIT_S,
                )
        for writer in connections.values():
            writer.transport.abort()  # a task that was cancelled before it began has not done it
        await take_turns(1)  # what is aborted closes its socket in the loop's next turn
        with contextlib.suppress(FileNotFoundError):
            if (
                self._path.lstat().st_ino == self._inode
            ):  # else it is the socket of a sidecar that has taken over
                self._path.unlink()

    async def _expire_tickets(self) -> None:
        for session in self.sessions:
            await session.expire_tickets()

    async def _replace_dead_socket(self) -> None:
        try:
            if not stat.S_ISSOCK(self._path.lstat().st_mode):
                raise ConfigError(
                    f"socket_path={str(self._path)!r}: something else than a socket is there;"
                    " choose another path"
                )
            _, writer = await asyncio.open_unix_connection(str(self._path))
        except (ConnectionRefusedError, FileNotFoundError):
            self._path.unlink(missing_ok=True)
            return
        writer.close()
        raise ConfigError(
            f"socket_path={str(self._path)!r}: another sidecar listens there; stop it or choose"
            " another path"
        )

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closed:  # it was accepted while this server was closing
            writer.transport.abort()
        elif len(self._connections) >= MAX_CLIENTS:
            self._log.log(
                logging.WARNING,
                "a client of the socket is turned away: %d are connected",
                len(self._connections),
            )
            self._context.counters.add(metrics.REFUSED_CLIENTS_TOTAL, 1, metrics.TOO_MANY)
            writer.close()
        else:
            task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
            self._connections[task] = writer
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._connections[task]
        if not task.cancelled() and (exc := task.exception()) is not None:
            logger.error("a session of the socket has failed: %s", exc, exc_info=exc)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = EngineSession(self._context, self._shared)
        if self._is_draining:
            session.refuse_stores()
        self._sessions.add(session)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._talk(session, reader, writer)
            logger.debug("a client of the socket went away")
            await session.close_cooperatively()
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
        finally:
            self._sessions.discard(session)
            session.close()
            writer.transport.abort()

    async def _talk(
        self, session: EngineSession, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            await self._converse(session, reader, writer)
        except ProtocolError as exc:
            self._log.log(logging.WARNING, "a client of the socket is refused: %s", exc)
            writer.write(m.encode(m.Refused("protocol", str(exc)[:512])))
            writer.write_eof()
            await _until_gone(reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            raise
        except Exception:
            writer.write_eof()
            await _until_gone(reader)
            raise

    async def _converse(
        self, session: EngineSession, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await self._answer_one(session, reader, writer)
        except TimeoutError as exc:
            raise ConnectionAbortedError("no HELLO in time") from exc
        while True:
            await self._answer_one(session, reader, writer)

    async def _answer_of(self, session: EngineSession, request: m.Request) -> m.Answer:
        """The answer, made within whose request it is; one that came without an id gets one,
        which what is asked of others carries too.
        """
        came = Carried()
        if isinstance(request, m.Within):
            came, request = (
                Carried.checked(request.request_id, request.traceparent),
                m.decode_request(request.request),
            )
        name = f"sidecar {type(request).__name__}"
        with working_for(
            name,
            Carried(came.request_id or self._ids.next(), came.traceparent),
            self._context.tracer,
        ):
            answer = await session.answer(request)
            logger.debug("%s is answered", name)
        return answer

    async def _answer_one(
        self, session: EngineSession, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with self._requests.next(reader) as request:
            answer = await self._answer_of(session, request)
        writer.write(m.encode(answer))
        await writer.drain()


async def _until_gone(reader: asyncio.StreamReader) -> None:
    """Until the client has closed its side it may still touch what is reserved or pinned for it:
    the memory stays its own.
    """
    while await reader.read(DISCARD_BYTES):
        pass
