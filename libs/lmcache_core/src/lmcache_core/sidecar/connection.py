"""One connection to the sidecar: a Unix socket and a mapping of its arena."""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from lmcache_core.errors import LMCacheError, ProtocolError, UnavailableError, VersionError
from lmcache_core.forks import ProcessMark
from lmcache_core.keys import CacheEngineKey, Lane
from lmcache_core.memory.arena_locks import FileLock, join_generation
from lmcache_core.memory.shared import SharedArena
from lmcache_core.record import HotVerifier
from lmcache_core.sidecar.mapping import ArenaMapping, ArenaMappings
from lmcache_core.wire.failures import LATE, reaching
from lmcache_core.wire.frames import HEADER_BYTES, MAGIC, FrameHeader, parse_header
from lmcache_core.wire.lanes import LaneNumbers, runs_of
from lmcache_core.wire.messages import (
    MAX_NAMES,
    ArenaInfo,
    DoneWith,
    ErrorCode,
    ErrorMessage,
    Hello,
    HelloOk,
    Message,
    NameRun,
    Ok,
    Ping,
    Pong,
    build_frame,
    parse_meta,
)
from lmcache_core.wire.requests import check_version, preface

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=Message)
MAX_UNANSWERED = 256
"""Requests on one connection whose answers have not been read."""
MAX_UNSAID = 4 * MAX_NAMES
"""Released tickets to report when the sidecar reads again; it forgets the others by itself."""
SEND_TIMEOUT_S = 0.002
"""Send timeout of a request that is not waited for: other threads are reading answers, and a
message may exceed the socket's buffer.
"""
POLL_S = 0.05
READ_BYTES = 64 << 10
QUICK_S = 0.003
"""A wait this short is always acceptable: a healthy sidecar answers in a fraction of it."""
MAX_DELAY = 0.02
"""Beyond that, an answer is worth waiting for if the wait is at most this fraction of what it can
save.
"""
MAX_FIRST_DELAY = 0.25
"""While all answers have been quick, a late one is awaited for up to this fraction."""
REST_PER_LOSS = 20
MAX_REST_S = 1.0
"""After a wait in vain, the sidecar is not asked for this many times as long, so that an unsteady
one costs a few percent at most.
"""
PROBE_S = 0.25
"""Interval between two probes of a late sidecar, from question to question: a probe that took
longer says little about the present, and may have waited for this process itself.
"""
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

    It also keeps how quickly the sidecar answers at present: the latest time given to `took`. While
    that is long, a background thread probes the sidecar. A late answer is not worth a wait that
    costs more than it can save (`is_worth`, `patience_s`).

    Args:
        timeout_s: Deadline of connecting, and of each call without its own.
        mappings: Those of the client; by default it has no other connection.
        on_lost: Called with this connection, the cause, and how many seconds a caller waited in
            vain, as soon as it is found to be lost; possibly several times, and in any thread.

    Attributes:
        is_greeted: Whether the sidecar has answered HELLO.
        greeting_s: How long that took.
        welcome: The answer. Valid after `open`, like the next attribute.
        arena_info: The sidecar's description of its arena.
    """

    welcome: HelloOk
    arena_info: ArenaInfo

    def __init__(
        self,
        path: Path,
        hello: Hello,
        timeout_s: float,
        mappings: ArenaMappings | None = None,
        on_lost: Callable[[SidecarConnection, LMCacheError, float], None] | None = None,
    ) -> None:
        self._path = path
        self._mappings = mappings or ArenaMappings()
        self._hello = hello
        self._timeout_s = timeout_s
        self._on_lost = on_lost
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
        self._unsaid: list[str] = []
        self._took_s = 0.0
        self._rests_until = 0.0
        self._prober: threading.Thread | None = None
        self._closing = threading.Event()
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
        place = f"sidecar at {self._path}"
        with reaching(place, ValueError, why=_why_unreachable):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            connection.settimeout(self._timeout_s)
            try:
                connection.connect(str(self._path))
            except BaseException:
                connection.close()
                raise
        self._socket, self._process, self._is_usable = connection, ProcessMark(), True
        begin = time.monotonic()
        try:
            with reaching(place):
                self.welcome, info = self._greet()
                self.arena_info, self.is_greeted = info, True
                self.greeting_s = time.monotonic() - begin
                self._generation_lock = join_generation(Path(info.path).parent, info.generation)
                self._mapping = self._mappings.of(info)
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
            self._closing.set()
            self._close_unless_held()

    def give_up(self, why: str) -> None:
        """Close a connection whose sidecar cannot be trusted, or missed a message that it must
        receive.
        """
        self.close()
        self._report_loss(ProtocolError(why), 0.0)

    def join(self) -> None:
        """Wait for the thread that probes the sidecar, after `close`."""
        prober = self._prober
        if prober is not None:
            prober.join(MAX_REST_S)

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
            if not self._read_until(question, deadline):
                self.close()
                raise UnavailableError(
                    f"sidecar at {self._path}: no answer to {question.name} within {limit_s:g} s"
                )
            assert question.answer is not None
            return question.answer

    def send(self, request: Message, expected: type[A]) -> Question[A]:
        """Send a request without waiting for its answer.

        Raises:
            UnavailableError: The connection is gone or busy, or has too many unanswered requests.
            ProtocolError: The sidecar refused an earlier one, or sent an unexpected answer.
        """
        try:
            with self._turn_within(SEND_TIMEOUT_S):
                return self._send(request, expected, SEND_TIMEOUT_S)
        except UnavailableError:
            if self.is_open and self.is_quick:
                # An earlier answer is late, or has arrived unread: the probe finds out.
                self.took(min(self._unanswered_s, 2 * QUICK_S))
            raise

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

    def unstage(self, tickets: Sequence[str]) -> None:
        """Report released tickets: now, or as soon as the sidecar is quick again. Does not wait for
        it.
        """
        self._unsaid += tickets[: MAX_UNSAID - len(self._unsaid)]
        if self.is_quick:
            self.say_unstaged()

    def say_unstaged(self) -> bool:
        """Report released tickets without waiting for an answer; return whether all have been
        reported.
        """
        if not self._unsaid:
            return True
        try:
            with self._turn_within(SEND_TIMEOUT_S):
                while said := tuple(self._unsaid[:MAX_NAMES]):
                    self._send(DoneWith((), said), Ok, SEND_TIMEOUT_S)
                    del self._unsaid[: len(said)]  # only here; other threads append
        except (UnavailableError, ProtocolError):
            self.took(max(self._took_s, 2 * QUICK_S))
            return False
        return True

    @property
    def is_quick(self) -> bool:
        """Return whether an immediate answer can be expected."""
        return self._took_s <= QUICK_S

    def is_worth(self, saving_s: float) -> bool:
        """Return whether an answer that can save `saving_s` is worth the wait."""
        return self._took_s <= max(QUICK_S, MAX_DELAY * saving_s)

    def patience_s(self, saving_s: float) -> float:
        """Return how long to wait for a late answer that can save `saving_s`."""
        return max(QUICK_S, MAX_FIRST_DELAY * saving_s)

    def took(self, seconds: float, rest_s: float = 0.0) -> None:
        """Record that an answer took `seconds`, or has been outstanding for that long.

        Args:
            rest_s: How long not to ask again even if the sidecar is quick.
        """
        self._took_s = seconds
        if seconds <= QUICK_S or not self.is_open:
            return
        with self._books:
            self._rests_until = max(self._rests_until, time.monotonic() + rest_s)
            if self._is_usable and (self._prober is None or not self._prober.is_alive()):
                prober = threading.Thread(
                    target=self._probe_until_quick, name="lmcache-sidecar-pace", daemon=True
                )
                try:
                    prober.start()
                except RuntimeError:  # no probe would ever say that it is quick again
                    self._took_s = 0.0
                else:
                    self._prober = prober

    def wasted(self, seconds: float) -> None:
        """Record that a caller waited this long in vain."""
        self.took(seconds, min(REST_PER_LOSS * seconds, MAX_REST_S))

    def probe(self) -> float:
        """Ask without blocking other threads' requests, and return how long the answer took.

        Return infinity if there is no answer, or the question cannot be sent now. A connection that
        leaves this question or an earlier one unanswered for its `timeout_s` is closed.
        """
        limit_s = self._timeout_s
        try:
            question = self.send(Ping(), Pong)
        except (UnavailableError, ProtocolError):
            # The connection may be full of questions that a hanging sidecar does not read. While
            # another thread holds it, nothing is known: that call has its own deadline.
            with contextlib.suppress(UnavailableError, ProtocolError):
                with self._turn_within(SEND_TIMEOUT_S):
                    self._read_arrived()
                if self._unanswered_s > limit_s:
                    self.give_up(f"an earlier request was not answered within {limit_s:g} s")
            return math.inf
        with contextlib.suppress(UnavailableError, ProtocolError):
            if self.await_answer(question, limit_s) is not None:
                return question.took_s
            self.give_up(f"{question.name} was not answered within {limit_s:g} s")
        return math.inf

    def _probe_until_quick(self) -> None:
        wait_s = 0.0
        while not self._closing.wait(max(wait_s, self._rests_until - time.monotonic())):
            took_s = self.probe()
            with self._books:
                # A rest may have begun during the probe.
                if took_s <= QUICK_S and time.monotonic() >= self._rests_until:
                    self._took_s = 0.0
                    self._prober = None
                    break
            wait_s = PROBE_S
            if QUICK_S < took_s < math.inf:
                self._took_s = took_s
                wait_s -= took_s
        self.say_unstaged()

    @property
    def _unanswered_s(self) -> float:
        """The age of the oldest question without an answer; 0.0 if there is none."""
        try:
            return time.monotonic() - self._unanswered[0].sent_at
        except IndexError:  # another thread may have read the answer: no lock is held
            return 0.0

    @contextlib.contextmanager
    def _turn_within(self, limit_s: float) -> Iterator[None]:
        """Exclude other threads' requests. A socket that breaks closes the connection, and a
        connection that is lost is reported.
        """
        begin = time.monotonic()
        try:
            self.hold(1)
            try:
                if not self._turn.acquire(timeout=limit_s):
                    raise UnavailableError(
                        f"sidecar at {self._path}: busy with requests of other threads"
                    )
                try:
                    with reaching(f"sidecar at {self._path}", close=self.close):
                        yield
                finally:
                    self._turn.release()
            finally:
                self.release(1)
        except (UnavailableError, ProtocolError) as exc:
            if self.is_open:
                logger.debug("the sidecar did not answer: error=%s", str(exc))
            else:
                self._report_loss(exc, time.monotonic() - begin)
            raise

    def _report_loss(self, cause: LMCacheError, cost_s: float) -> None:
        if self._on_lost is not None:
            self._on_lost(self, cause, cost_s)

    def _greet(self) -> tuple[HelloOk, ArenaInfo]:
        try:
            welcome = self.call(self._hello, HelloOk)
        except _NotAFrame as exc:
            # One text for all cases: `SidecarLink` logs each cause once, not each random byte.
            raise ProtocolError(
                "the server on this socket speaks another protocol; set sidecar_socket to a"
                " sidecar's socket"
            ) from exc
        check_version("the sidecar", self._hello, welcome)
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
        self._usable_socket()
        if len(self._unanswered) >= MAX_UNANSWERED:
            self._read_arrived()  # answers may have arrived unread
        if len(self._unanswered) >= MAX_UNANSWERED:
            raise UnavailableError(
                f"sidecar at {self._path}: {MAX_UNANSWERED} requests are unanswered"
            )
        question = Question(self._last_id + 1, request, expected)
        frames = build_frame(question.id, request)
        if self.is_greeted:
            frames = preface(question.id) + frames
        deadline = time.monotonic() + limit_s
        if not self._flush(deadline):
            raise UnavailableError(f"sidecar at {self._path}: it reads no requests")
        self._last_id = question.id
        self._unanswered.append(question)  # type: ignore[arg-type]
        with self._books:
            self._unsent += self._undeclared + frames
            self._undeclared.clear()
        self._flush(deadline)  # the rest is sent before the next answer is read
        return question

    def _flush(self, deadline: float) -> bool:
        """Send what could not be sent before; return whether that was possible in time.

        Raises:
            OSError: The connection is broken.
        """
        connection = self._usable_socket()
        try:
            while self._unsent:
                connection.settimeout(max(0.0, deadline - time.monotonic()))
                del self._unsent[: connection.send(self._unsent)]
        except LATE:
            return False
        return True

    def _read_arrived(self) -> None:
        if self._unanswered:
            self._read_until(self._unanswered[-1], 0.0)

    def _read_until(self, question: Question[A], deadline: float) -> bool:
        """Read answers up to that of `question`; return whether it arrived in time.

        Raises:
            OSError: The connection is broken.
            ProtocolError: The sidecar refused a request, or sent an unexpected answer.
        """
        while question.answer is None:
            # A sidecar that is waiting for us to read its answers reads no questions until we do.
            self._flush(deadline)
            try:
                header, answer = self._next_frame(self._usable_socket(), deadline)
            except LATE:
                return False
            except ProtocolError as exc:
                self.close()
                raise _NotAFrame(str(exc)) from exc
            try:
                self._accept(self._unanswered.popleft(), header.correlation_id, answer)
            except ProtocolError:
                self.close()
                raise
        return True

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

    def _usable_socket(self) -> socket.socket:
        connection = self._socket
        if connection is None or not self.is_open:
            raise UnavailableError("the connection to the sidecar is closed")
        return connection

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


def _why_unreachable(exc: Exception) -> str:
    return f"{exc}{_FIXES.get(type(exc), '')}"
