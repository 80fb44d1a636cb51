"""One connection to the sidecar: a Unix socket and a mapping of its arena."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from msgspec.structs import replace

from lmcache_core.errors import ProtocolError, UnavailableError, VersionError
from lmcache_core.keys import CacheEngineKey, Lane
from lmcache_core.memory.populate import BackgroundPopulation
from lmcache_core.memory.shared import SharedArena, attach_shared_arena
from lmcache_core.record import HotVerifier
from lmcache_core.telemetry.request_context import carried
from lmcache_core.wire.capabilities import CONTEXT, LOCKS
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
"""For a request that is not waited for: other threads look for answers, and a message may exceed
the socket's buffer.
"""
POLL_S = 0.05
READ_BYTES = 64 << 10
_FIXES: dict[type[Exception], str] = {
    FileNotFoundError: (
        "; run lmcache-sidecar, or set sidecar_socket to the socket that it names in its log"
    ),
    PermissionError: (
        "; let the user that runs the engine use this socket, and the directory that it is in"
    ),
}


class Question(Generic[A]):
    """A request that was sent; `answer` is None until it has been read, `took_s` seconds later.

    Args:
        id: Its correlation id.
        request: What was sent.
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
    """A connection that has said HELLO. Thread-safe; requests of several threads take turns.
    Unusable in a forked child.

    The sidecar answers in the order of the requests. So a request may be sent without waiting
    (`send`); the next call reads its answer before its own.

    Reservations and pins belong to it: when its socket closes, the sidecar takes them back and
    gives the memory to others. So the socket of a connection that is given up stays until nothing
    is held through it any more (`hold`, `let_go`). So does its share in the lock of the sidecar's
    generation, from which the next sidecar knows what may still be written to.

    Args:
        path: The sidecar's socket.
        hello: What to say first.
        timeout_s: Deadline of connecting, and of each call that names none.

    Attributes:
        is_greeted: Whether the sidecar has answered HELLO.
        greeting_s: How long that took.
        welcome: The answer. Only after `open`, as the next one.
        arena_info: What the sidecar has said about its arena.
        verifier: Chooses what is verified of what is loaded.
    """

    welcome: HelloOk
    arena_info: ArenaInfo

    def __init__(self, path: Path, hello: Hello, timeout_s: float) -> None:
        self._path = path
        self._hello = replace(hello, capabilities=[*hello.capabilities, LOCKS])
        self._timeout_s = timeout_s
        self._turn = threading.Lock()
        self._books = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = 0
        self._is_usable = False
        self._num_held = 0
        self._unanswered: deque[Question[Message]] = deque()
        self._last_id = 0
        self._lanes = LaneNumbers()
        self._undeclared = bytearray()  # LANE frames that go before the next request
        self._header: FrameHeader | None = None  # of the frame that is arriving
        self._received = bytearray()
        self._unsent = bytearray()
        self._arena: SharedArena | None = None
        self._population: BackgroundPopulation | None = None
        self.is_greeted = False
        self.greeting_s = 0.0
        self.verifier = HotVerifier("always")

    @property
    def is_open(self) -> bool:
        """Return whether calls can be made."""
        return self._is_usable and self._pid == os.getpid()

    @property
    def has_ended(self) -> bool:
        """Return whether the other end has closed the socket, as far as is known without asking it.
        Waits for nothing.
        """
        with self._books:
            if self._socket is None:
                return True
            ended = select.poll()
            ended.register(self._socket, select.POLLRDHUP)
            return bool(ended.poll(0))

    @property
    def arena(self) -> SharedArena:
        """Return the mapped arena. Only after `open`; stays mapped while a view is held."""
        assert self._arena is not None
        return self._arena

    def open(self) -> None:
        """Connect, say HELLO, join the sidecar's generation, map the arena.

        Raises:
            UnavailableError: The sidecar does not listen, or does not answer in time.
            VersionError: The sidecar speaks no version of ours.
            ProtocolError: Its answer makes no sense.
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
        self._socket, self._pid, self._is_usable = connection, os.getpid(), True
        begin = time.monotonic()
        try:
            self.welcome, info = self._greet()
            self.arena_info, self.is_greeted = info, True
            self.greeting_s = time.monotonic() - begin
            self._arena = attach_shared_arena(Path(info.path), info.num_bytes, info.generation)
            self._population = BackgroundPopulation((self._arena.store_view, self._arena.load_view))
        except (UnavailableError, ProtocolError):
            self.close()
            raise
        self.verifier = HotVerifier.lenient(info.verify_hot)

    def names(self, keys: Sequence[CacheEngineKey]) -> list[NameRun]:
        """Return keys as a request on this connection names them."""
        runs = runs_of(keys)
        self._declare(lane for lane, _ in runs if lane is not None)
        return self._lanes.names(runs)

    def lane_number(self, lane: Lane) -> int:
        """Return the number of a lane on this connection.

        Raises:
            UnavailableError: The connection has no number left.
        """
        self._declare([lane])
        number = self._lanes.number(lane)
        if number is None:
            raise UnavailableError("this connection has declared as many lanes as it may")
        return number

    def close(self) -> None:
        """Make no more calls; close the socket as soon as nothing is held. Idempotent."""
        with self._books:
            self._is_usable = False
            if self._population is not None:
                self._population.stop()
            self._close_unless_held()

    def hold(self, count: int) -> None:
        """Keep the socket open for that many pieces of the arena; before they are asked for, so
        that no gap is left.
        """
        with self._books:
            self._num_held += count

    def let_go(self, count: int) -> None:
        """Undo `hold`: that many pieces are not touched any more."""
        with self._books:
            self._num_held -= count
            assert self._num_held >= 0, "more was let go than was held"
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
            request: What to send.
            expected: Class of the answer.
            timeout_s: Deadline of the exchange; past it the connection is given up, since an answer
                may still be on its way.
            turn_s: Longest wait for requests of other threads; past it the connection is as good as
                before. By default `timeout_s`.

        Raises:
            UnavailableError: The connection is gone or busy, or the deadline has passed.
            VersionError: HELLO was refused for its version.
            ProtocolError: The sidecar refused the request or answered something else.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with self._turn_within(limit_s if turn_s is None else turn_s):
            deadline = time.monotonic() + limit_s
            question = self._send(request, expected, limit_s)
            try:
                self._read_until(question, deadline)
            except OSError as exc:
                raise self._broken(exc) from exc
            assert question.answer is not None
            return question.answer

    def send(self, request: Message, expected: type[A]) -> Question[A]:
        """Send a request without waiting for its answer.

        Raises:
            UnavailableError: The connection is gone or busy, or too many answers are missing.
        """
        with self._turn_within(SEND_TIMEOUT_S):
            return self._send(request, expected, SEND_TIMEOUT_S)

    @property
    def unanswered_s(self) -> float:
        """Age of the oldest question whose answer has not been read; 0.0 if there is none."""
        try:
            return time.monotonic() - self._unanswered[0].sent_at
        except IndexError:  # without the turn, another thread may just have read it
            return 0.0

    def read_arrived(self) -> float:
        """Read the answers that have arrived; return the age of the oldest question without one.

        Raises:
            UnavailableError: The connection is gone or busy.
            ProtocolError: The sidecar refused a request, or answered something else.
        """
        with self._turn_within(SEND_TIMEOUT_S):
            self._read_arrived()
            return self.unanswered_s

    def answer_to(self, question: Question[A], wait_s: float) -> A | None:
        """Return the answer if it arrives within `wait_s`, else None; the connection stays open.

        Raises:
            UnavailableError: The connection is gone.
            ProtocolError: The sidecar refused this request or an earlier one, or answered something
                else.
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
        """Like `answer_to`, but leave the connection to other threads while nothing arrives."""
        deadline = time.monotonic() + timeout_s
        self.hold(1)
        try:
            while (answer := self.answer_to(question, 0.0)) is None and (
                left_s := deadline - time.monotonic()
            ) > 0:
                assert self._socket is not None, "it is held"
                arrives = select.poll()
                arrives.register(self._socket, select.POLLIN)
                # Another thread may read our answer along with its own: look again soon.
                arrives.poll(min(left_s, POLL_S) * 1000)
            return answer
        finally:
            self.let_go(1)

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
            self.let_go(1)

    def _greet(self) -> tuple[HelloOk, ArenaInfo]:
        try:
            welcome = self.call(self._hello, HelloOk)
        except _NotAFrame as exc:
            # One text for all of it: `SidecarLink` reports each cause once, not each random byte.
            raise ProtocolError(
                "what answers there speaks another protocol; set sidecar_socket to a sidecar's"
                " socket"
            ) from exc
        if not self._hello.version_min <= welcome.version <= self._hello.version_max:
            spoken = f"{self._hello.version_min} to {self._hello.version_max}"
            raise VersionError(
                f"the sidecar answered in version {welcome.version}; this client speaks {spoken}"
            )
        if welcome.arena is None:
            raise ProtocolError(
                "what answers there has no arena; set sidecar_socket to a sidecar's socket"
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
            self._read_arrived()  # some may have arrived and not been fetched
        if len(self._unanswered) >= MAX_UNANSWERED:
            raise UnavailableError(
                f"sidecar at {self._path}: {MAX_UNANSWERED} requests are not answered yet"
            )
        question = Question(self._last_id + 1, request, expected)
        frames = self._preface(question.id) + build_frame(question.id, request)
        deadline = time.monotonic() + limit_s
        try:
            self._flush(connection, deadline)
        except (TimeoutError, BlockingIOError) as exc:
            raise UnavailableError(f"sidecar at {self._path}: it does not read") from exc
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
        """Read answers up to that one.

        Raises:
            OSError: It did not arrive in time (`TimeoutError`, `BlockingIOError`).
            UnavailableError: The connection is broken.
        """
        while question.answer is None:
            connection = self._usable_socket()
            # A sidecar that waits for us to read its answers takes no more questions until we do.
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
            if not self._received.startswith(MAGIC):  # a stranger may say less than a header
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
        """Receive until there are so many bytes."""
        while (missing := num_bytes - len(self._received)) > 0:
            connection.settimeout(max(0.0, deadline - time.monotonic()))
            received = connection.recv(max(missing, READ_BYTES))
            if not received:
                raise ConnectionResetError("it closed the connection")
            self._received += received

    def _taken(self, num_bytes: int) -> bytes:
        data = bytes(memoryview(self._received)[:num_bytes])
        del self._received[:num_bytes]
        return data

    def _accept(self, question: Question[Message], correlation_id: int, answer: Message) -> None:
        is_error = isinstance(answer, ErrorMessage)
        if correlation_id != question.id and not (is_error and correlation_id == 0):
            raise ProtocolError(
                f"the sidecar answered request {correlation_id} where {question.id} was due"
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
        """Return the CONTEXT frame of a request, where one is known and the sidecar heeds it."""
        whose = carried()
        if whose is None or not self.is_greeted or CONTEXT not in self.welcome.capabilities:
            return b""
        return build_frame(correlation_id, Context(whose.request_id, whose.traceparent))

    def _close_unless_held(self) -> None:
        connection = self._socket
        if self._is_usable or self._num_held or connection is None:
            return
        self._socket = None
        if self._arena is not None:
            self._arena.lock.release()
        if self._pid == os.getpid():  # in a forked child it would end the parent's connection
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        connection.close()


class _NotAFrame(ProtocolError):
    """Bytes that are no frame of this protocol."""
