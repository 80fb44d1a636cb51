"""One connection to the sidecar: a Unix socket and a mapping of its arena."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from lmcache_core.errors import ProtocolError, UnavailableError, VersionError
from lmcache_core.forks import ProcessMark
from lmcache_core.keys import CacheEngineKey, Lane
from lmcache_core.memory.arena_locks import FileLock, join_generation
from lmcache_core.memory.populate import BackgroundPopulation
from lmcache_core.memory.shared import SharedArena
from lmcache_core.record import HotVerifier
from lmcache_core.sidecar.mapping import ArenaMapping, ArenaMappings
from lmcache_core.telemetry.request_context import carried
from lmcache_core.wire.frames import HEADER_BYTES, MAGIC, FrameHeader, parse_header
from lmcache_core.wire.lanes import LaneNumbers, runs_of
from lmcache_core.wire.messages import (
    ArenaInfo,
    Context,
    ErrorCode,
    ErrorMessage,
    Hello,
    HelloOk,
    Message,
    NameRun,
    build_frame,
    parse_meta,
)

A = TypeVar("A", bound=Message)
MAX_UNANSWERED = 256
"""Requests on one connection whose answers have not been read."""
SEND_TIMEOUT_S = 0.002
"""Send timeout of a request that is not waited for: other threads are reading answers, and a
message may exceed the socket's buffer.
"""
POLL_S = 0.05
READ_BYTES = 64 << 10
_FIXES: dict[type[Exception], str] = {
    FileNotFoundError: (
        "; run lmcache-sidecar, or set sidecar_socket to the socket that it names in its log"
    ),
    PermissionError: (
        "; give the user that runs the engine access to this socket and its directory"
    ),
}


class Question(Generic[A]):
    """A request that was sent; `answer` is None until it has been read, `took_s` seconds later.

    Args:
        id: Its correlation id.
        request: The message that was sent.
        expected: Class of the answer.
    """

    def __init__(self, id: int, request: Message, expected: type[A]) -> None:
        self.id = id
        self.name = request.frame_type.name
        self.expected = expected
        self.answer: A | None = None
        self.sent_at = time.monotonic()
        self.took_s = 0.0


class SidecarConnection:
    """A connection that has sent HELLO. Thread-safe; requests of several threads take turns.
    Unusable in a forked child.

    The sidecar answers requests in order. So a request may be sent without waiting (`send`); the
    next call reads its answer first.

    Reservations and pins belong to the connection: when its socket closes, the sidecar reclaims
    their memory and reuses it. So the socket of an abandoned connection stays open until nothing is
    held through it (`hold`, `release`). So does its share of the lock on the sidecar's generation,
    which tells the next sidecar what may still be written to.

    Args:
        path: The sidecar's socket.
        hello: First message to send.
        timeout_s: Deadline of connecting, and of each call without its own.
        mappings: Those of the client; by default it has no other connection.

    Attributes:
        is_greeted: Whether the sidecar has answered HELLO.
        greeting_s: How long that took.
        welcome: The answer. Valid after `open`, like the next attribute.
        arena_info: The sidecar's description of its arena.
        verifier: Chooses which loaded chunks are verified.
    """

    welcome: HelloOk
    arena_info: ArenaInfo

    def __init__(
        self,
        path: Path,
        hello: Hello,
        timeout_s: float,
        mappings: ArenaMappings | None = None,
    ) -> None:
        self._path = path
        self._mappings = mappings or ArenaMappings()
        self._hello = hello
        self._timeout_s = timeout_s
        self._turn = threading.Lock()
        self._books = threading.Lock()
        self._socket: socket.socket | None = None
        self._process = ProcessMark()
        self._is_usable = False
        self._num_held = 0
        self._unanswered: deque[Question[Message]] = deque()
        self._last_id = 0
        self._lanes = LaneNumbers()
        self._undeclared = bytearray()  # LANE frames to send before the next request
        self._header: FrameHeader | None = None  # of the frame that is arriving
        self._received = bytearray()
        self._unsent = bytearray()
        self._generation_lock: FileLock | None = None
        self._mapping: ArenaMapping | None = None
        self._population: BackgroundPopulation | None = None
        self.is_greeted = False
        self.greeting_s = 0.0
        self.verifier = HotVerifier("always")

    @property
    def is_open(self) -> bool:
        """Return whether calls can be made."""
        return self._is_usable and self._process.is_here

    @property
    def has_ended(self) -> bool:
        """Return whether the other end is known to have closed the socket. Does not wait."""
        with self._books:
            if self._socket is None:
                return True
            ended = select.poll()
            ended.register(self._socket, select.POLLRDHUP)
            return bool(ended.poll(0))

    @property
    def arena(self) -> SharedArena:
        """Return the mapped arena. Only after `open`; it stays mapped while a view is held."""
        return self.mapping.arena

    @property
    def mapping(self) -> ArenaMapping:
        """Return the mapping of the arena. Only after `open`."""
        assert self._mapping is not None
        return self._mapping

    def open(self) -> None:
        """Connect, send HELLO, join the sidecar's generation, and map the arena.

        Raises:
            UnavailableError: The sidecar does not listen, or does not answer in time.
            VersionError: The sidecar supports none of our protocol versions.
            ProtocolError: Its answer is malformed.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(self._timeout_s)
        try:
            connection.connect(str(self._path))
        except (OSError, ValueError) as exc:
            connection.close()
            raise UnavailableError(
                f"sidecar at {self._path}: {exc}{_FIXES.get(type(exc), '')}"
            ) from exc
        self._socket, self._process, self._is_usable = connection, ProcessMark(), True
        begin = time.monotonic()
        try:
            self.welcome, info = self._greet()
            self.arena_info, self.is_greeted = info, True
            self.greeting_s = time.monotonic() - begin
            self._generation_lock = join_generation(Path(info.path).parent, info.generation)
            self._mapping = self._mappings.of(info)
            self._population = BackgroundPopulation((self.arena.store_view, self.arena.load_view))
        except (UnavailableError, ProtocolError):
            self.close()
            raise
        self.verifier = HotVerifier.lenient(info.verify_hot)

    def names(self, keys: Sequence[CacheEngineKey]) -> list[NameRun]:
        """Return keys in the form in which requests on this connection name them."""
        runs = runs_of(keys)
        self._declare(lane for lane, _ in runs if lane is not None)
        return self._lanes.names(runs)

    def lane_number(self, lane: Lane) -> int:
        """Return the number of a lane on this connection.

        Raises:
            UnavailableError: The connection has no numbers left.
        """
        self._declare([lane])
        number = self._lanes.number(lane)
        if number is None:
            raise UnavailableError("this connection has no lane numbers left")
        return number

    def close(self) -> None:
        """Refuse further calls; close the socket as soon as nothing is held. Idempotent."""
        with self._books:
            self._is_usable = False
            if self._population is not None:
                self._population.stop()
            self._close_unless_held()

    def hold(self, count: int) -> None:
        """Keep the socket open for `count` pieces of the arena. Call it before requesting them, so
        that the socket cannot close in between.
        """
        with self._books:
            self._num_held += count

    def release(self, count: int) -> None:
        """Undo `hold`: that many pieces are no longer accessed."""
        with self._books:
            self._num_held -= count
            assert self._num_held >= 0, "more was released than held"
            self._close_unless_held()

    def call(
        self,
        request: Message,
        expected: type[A],
        timeout_s: float | None = None,
        turn_s: float | None = None,
    ) -> A:
        """Send a request and wait for its answer.

        Args:
            request: The message to send.
            expected: Class of the answer.
            timeout_s: Deadline of the exchange. If it passes, the connection is closed, because an
                answer may still arrive.
            turn_s: Longest wait for requests of other threads. If it passes, the connection remains
                usable. By default `timeout_s`.

        Raises:
            UnavailableError: The connection is gone or busy, or the deadline has passed.
            VersionError: HELLO was refused for its version.
            ProtocolError: The sidecar refused the request or sent an unexpected answer.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with self._turn_within(limit_s if turn_s is None else turn_s):
            deadline = time.monotonic() + limit_s
            question = self._send(request, expected, limit_s)
            try:
                self._read_until(question, deadline)
            except OSError as exc:  # the deadline has passed
                self.close()
                raise UnavailableError(
                    f"sidecar at {self._path}: no answer to {question.name} within {limit_s:g} s"
                ) from exc
            assert question.answer is not None
            return question.answer

    def send(self, request: Message, expected: type[A]) -> Question[A]:
        """Send a request without waiting for its answer.

        Raises:
            UnavailableError: The connection is gone or busy, or has too many unanswered requests.
        """
        with self._turn_within(SEND_TIMEOUT_S):
            return self._send(request, expected, SEND_TIMEOUT_S)

    @property
    def unanswered_s(self) -> float:
        """The age of the oldest question without an answer; 0.0 if there is none."""
        try:
            return time.monotonic() - self._unanswered[0].sent_at
        except IndexError:  # another thread may have read the answer: no lock is held
            return 0.0

    def read_arrived(self) -> float:
        """Read the answers that have arrived; return the age of the oldest unanswered question.

        Raises:
            UnavailableError: The connection is gone or busy.
            ProtocolError: The sidecar refused a request or sent an unexpected answer.
        """
        with self._turn_within(SEND_TIMEOUT_S):
            self._read_arrived()
            return self.unanswered_s

    def answer_to(self, question: Question[A], wait_s: float) -> A | None:
        """Return the answer if it arrives within `wait_s`, else None; the connection stays open.

        Raises:
            UnavailableError: The connection is gone.
            ProtocolError: The sidecar refused this request or an earlier one, or sent an unexpected
                answer.
        """
        deadline = time.monotonic() + wait_s
        try:
            with self._turn_within(wait_s):
                self._read_until(question, deadline)
        except (TimeoutError, BlockingIOError):
            pass
        except UnavailableError:
            if question.answer is None and not self.is_open:
                raise
        return question.answer

    def await_answer(self, question: Question[A], timeout_s: float) -> A | None:
        """Like `answer_to`, but release the connection to other threads while nothing arrives."""
        deadline = time.monotonic() + timeout_s
        self.hold(1)
        try:
            while (answer := self.answer_to(question, 0.0)) is None and (
                left_s := deadline - time.monotonic()
            ) > 0:
                assert self._socket is not None, "the connection is held"
                arrives = select.poll()
                arrives.register(self._socket, select.POLLIN)
                # Another thread may read our answer along with its own: check again soon.
                arrives.poll(min(left_s, POLL_S) * 1000)
            return answer
        finally:
            self.release(1)

    @contextlib.contextmanager
    def _turn_within(self, limit_s: float) -> Iterator[None]:
        self.hold(1)
        try:
            if not self._turn.acquire(timeout=limit_s):
                raise UnavailableError(
                    f"sidecar at {self._path}: busy with requests of other threads"
                )
            try:
                yield
            finally:
                self._turn.release()
        finally:
            self.release(1)

    def _greet(self) -> tuple[HelloOk, ArenaInfo]:
        try:
            welcome = self.call(self._hello, HelloOk)
        except _NotAFrame as exc:
            # One text for all cases: `SidecarLink` reports each cause once, not each random byte.
            raise ProtocolError(
                "the server on this socket speaks another protocol; set sidecar_socket to a"
                " sidecar's socket"
            ) from exc
        if not self._hello.version_min <= welcome.version <= self._hello.version_max:
            spoken = f"{self._hello.version_min} to {self._hello.version_max}"
            raise VersionError(
                f"the sidecar answered in version {welcome.version}; this client supports {spoken}"
            )
        if welcome.arena is None:
            raise ProtocolError(
                "the server on this socket has no arena; set sidecar_socket to a sidecar's socket"
            )
        return welcome, welcome.arena

    def _declare(self, lanes: Iterable[Lane]) -> None:
        with self._books:
            for lane in lanes:
                declared = self._lanes.declaration(lane)
                if declared is not None:
                    self._undeclared += build_frame(0, declared)
                    self._lanes.add(declared)

    def _send(self, request: Message, expected: type[A], limit_s: float) -> Question[A]:
        connection = self._usable_socket()
        if len(self._unanswered) >= MAX_UNANSWERED:
            self._read_arrived()  # answers may have arrived unread
        if len(self._unanswered) >= MAX_UNANSWERED:
            raise UnavailableError(
                f"sidecar at {self._path}: {MAX_UNANSWERED} requests are unanswered"
            )
        question = Question(self._last_id + 1, request, expected)
        frames = self._preface(question.id) + build_frame(question.id, request)
        deadline = time.monotonic() + limit_s
        try:
            self._flush(connection, deadline)
        except (TimeoutError, BlockingIOError) as exc:
            raise UnavailableError(f"sidecar at {self._path}: it reads no requests") from exc
        self._last_id = question.id
        self._unanswered.append(question)  # type: ignore[arg-type]
        with self._books:
            self._unsent += self._undeclared + frames
            self._undeclared.clear()
        with contextlib.suppress(
            TimeoutError, BlockingIOError
        ):  # the rest is sent before the next answer is read
            self._flush(connection, deadline)
        return question

    def _flush(self, connection: socket.socket, deadline: float) -> None:
        """Send what could not be sent before.

        Raises:
            OSError: The socket's buffer is full (`TimeoutError`, `BlockingIOError`).
            UnavailableError: The connection is broken.
        """
        try:
            while self._unsent:
                connection.settimeout(max(0.0, deadline - time.monotonic()))
                del self._unsent[: connection.send(self._unsent)]
        except (TimeoutError, BlockingIOError):
            raise
        except OSError as exc:
            raise self._broken(exc) from exc

    def _read_arrived(self) -> None:
        if self._unanswered:
            with contextlib.suppress(TimeoutError, BlockingIOError):
                self._read_until(self._unanswered[-1], 0.0)

    def _read_until(self, question: Question[A], deadline: float) -> None:
        """Read answers up to that of `question`.

        Raises:
            OSError: It did not arrive in time (`TimeoutError`, `BlockingIOError`).
            UnavailableError: The connection is broken.
        """
        while question.answer is None:
            connection = self._usable_socket()
            # A sidecar that is waiting for us to read its answers reads no questions until we do.
            with contextlib.suppress(TimeoutError, BlockingIOError):
                self._flush(connection, deadline)
            try:
                header, answer = self._next_frame(connection, deadline)
            except ProtocolError as exc:
                self.close()
                raise _NotAFrame(str(exc)) from exc
            except (TimeoutError, BlockingIOError):
                raise
            except OSError as exc:
                raise self._broken(exc) from exc
            try:
                self._accept(self._unanswered.popleft(), header.correlation_id, answer)
            except ProtocolError:
                self.close()
                raise

    def _next_frame(
        self, connection: socket.socket, deadline: float
    ) -> tuple[FrameHeader, Message]:
        if self._header is None:
            self._fill(connection, len(MAGIC), deadline)
            if not self._received.startswith(MAGIC):  # a foreign server may send less than a header
                raise ProtocolError("not a frame: wrong magic")
            self._fill(connection, HEADER_BYTES, deadline)
            header = parse_header(self._taken(HEADER_BYTES))
            if header.blob_bytes:
                raise ProtocolError(f"{header.type.name} with a blob")
            self._header = header
        self._fill(connection, self._header.meta_bytes, deadline)
        header, self._header = self._header, None
        return header, parse_meta(header.type, self._taken(header.meta_bytes))

    def _fill(self, connection: socket.socket, num_bytes: int, deadline: float) -> None:
        """Receive until `num_bytes` are buffered."""
        while (missing := num_bytes - len(self._received)) > 0:
            connection.settimeout(max(0.0, deadline - time.monotonic()))
            received = connection.recv(max(missing, READ_BYTES))
            if not received:
                raise ConnectionResetError("the sidecar closed the connection")
            self._received += received

    def _taken(self, num_bytes: int) -> bytes:
        data = bytes(memoryview(self._received)[:num_bytes])
        del self._received[:num_bytes]
        return data

    def _accept(self, question: Question[Message], correlation_id: int, answer: Message) -> None:
        is_error = isinstance(answer, ErrorMessage)
        if correlation_id != question.id and not (is_error and correlation_id == 0):
            raise ProtocolError(
                f"the sidecar answered request {correlation_id}, expected {question.id}"
            )
        if isinstance(answer, ErrorMessage):
            kind = VersionError if answer.code == ErrorCode.VERSION else ProtocolError
            raise kind(f"the sidecar refused {question.name}: {answer.code}: {answer.message}")
        if not isinstance(answer, question.expected):
            raise ProtocolError(
                f"the sidecar answered {question.name} with {answer.frame_type.name}"
            )
        question.took_s = time.monotonic() - question.sent_at
        question.answer = answer

    def _broken(self, cause: OSError) -> UnavailableError:
        self.close()
        return UnavailableError(f"sidecar at {self._path}: {cause}")

    def _usable_socket(self) -> socket.socket:
        connection = self._socket
        if connection is None or not self.is_open:
            raise UnavailableError("the connection to the sidecar is closed")
        return connection

    def _preface(self, correlation_id: int) -> bytes:
        """Return the CONTEXT frame of a request, if there is a trace."""
        whose = carried()
        if whose is None or not self.is_greeted:
            return b""
        return build_frame(correlation_id, Context(whose.request_id, whose.traceparent))

    def _close_unless_held(self) -> None:
        connection = self._socket
        if self._is_usable or self._num_held or connection is None:
            return
        self._socket = None
        if self._generation_lock is not None:
            self._generation_lock.release()
        if self._process.is_here:  # in a forked child this would end the parent's connection
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        connection.close()


class _NotAFrame(ProtocolError):
    """The bytes received are not a frame of this protocol."""
