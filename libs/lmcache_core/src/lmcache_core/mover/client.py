"""The sidecar's connection to its mover, and who owns the memory that the mover writes to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from lmcache_core.concurrency import TaskSupervisor
from lmcache_core.errors import UnavailableError
from lmcache_core.memory.base import MemoryObj
from lmcache_core.memory.counted import CountingAllocator
from lmcache_core.mover.messages import (
    MAX_PACKET_BYTES,
    Attach,
    Attached,
    Cancel,
    Quiet,
    Read,
    Report,
    Request,
    Serve,
)
from lmcache_core.telemetry.sparse_log import SparseLog

logger = logging.getLogger(__name__)

ATTACH_S: Final = 30.0
"""Longest time for a mover to map and register an arena."""
QUIET_S: Final = 2.0
"""How long a read that has been given up may stay unquiet, before its mover is ended."""
RECONNECT_S: Final = 0.2
REFUSED_S: Final = 5.0
"""Wait after a connection whose mover could not attach, since each costs a process."""
GIVEN_UP_SHARE: Final = 8
"""Nothing more is read while one part in this many of the arena is memory of reads that were given
up.
"""
LENT_SHARE: Final = 8
"""No more than one part in this many of the arena is lent."""


class Piece(NamedTuple):
    """What is read at once.

    Attributes:
        address: Where it lies in the memory of the peer's mover.
        memory: Memory in the arena of exactly its length.
    """

    address: int
    memory: MemoryObj


@dataclass(eq=False)
class _Owned:
    """Memory that the mover owns.

    Attributes:
        quiet: Set when the mover no longer owns it: to the error, or to "" if it is filled.
    """

    memory: Sequence[MemoryObj]
    quiet: asyncio.Future[str]
    is_given_up: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(memory.get_size() for memory in self.memory)


@dataclass(eq=False)
class _Life:
    """A connection to the mover.

    Attributes:
        owned: By the id of the read.
        ended: Set once the mover is dead.
    """

    connection: socket.socket
    attached: Attached
    owned: dict[int, _Owned] = field(default_factory=dict)
    is_ending: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class MoverClient:
    """Reads from peers through the mover. For use on one event loop.

    A read that is given up, at its deadline or by cancellation, leaves its memory to the mover. It
    comes back once the mover says that nothing writes to it any more, or is dead. A mover that does
    not say so for `QUIET_S` is ended.

    Args:
        path: The mover's socket.
        arena: What the mover maps.
        allocator: Divides it.

    Attributes:
        num_lives: How many movers there have been so far.
    """

    def __init__(self, path: Path, arena: Attach, allocator: CountingAllocator) -> None:
        self._path = path
        self._arena = arena
        self._allocator = allocator
        self._log = SparseLog(logger)
        self._lent_bytes = 0
        self._life: _Life | None = None
        self._ids = itertools.count(1)
        self._tasks = TaskSupervisor("mover")
        self.num_lives = 0

    @property
    def blob(self) -> bytes:
        """Return how peers reach the mover; empty while there is none."""
        life = self._life
        return b"" if life is None or life.is_ending else life.attached.blob

    @property
    def given_up_bytes(self) -> int:
        """Return how much memory the mover owns for reads that were given up."""
        owned = () if self._life is None else self._life.owned.values()
        return sum(each.num_bytes for each in owned if each.is_given_up)

    def open(self) -> None:
        """Connect to the mover in the background, and again whenever it has ended."""
        self._tasks.repeat("connection", self._live, RECONNECT_S)

    async def close(self) -> None:
        """End the mover, and wait for `QUIET_S` until it is dead. What it owns is its own until
        then.
        """
        life = self._life
        if life is not None:
            self._end(life)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUIET_S):
                    await life.ended.wait()
        await self._tasks.close()

    def takes(self, memory: MemoryObj) -> bool:
        """Return whether this memory is in the arena."""
        return self._allocator.owns(memory)

    def lend(self, memory: MemoryObj) -> int | None:
        """Return where movers of peers read this memory, until `take_back`; None if they cannot, or
        too much is lent. The mover attends to peers as long as anything is.
        """
        lent_bytes, life = self._lent_bytes + memory.get_size(), self._life
        too_many = lent_bytes > self._arena.num_bytes // LENT_SHARE
        if life is None or too_many or not self.takes(memory):
            return None
        if not self._lent_bytes:
            self._send(life, Serve(True))
        self._lent_bytes = lent_bytes
        return life.attached.address + memory.metadata.address

    def take_back(self, memory: MemoryObj) -> None:
        """End a loan."""
        self._lent_bytes -= memory.get_size()
        if not self._lent_bytes and self._life is not None:
            self._send(self._life, Serve(False))

    async def read(self, blob: bytes, pieces: Sequence[Piece], timeout_s: float) -> None:
        """Fill memory from the mover of a peer. What has arrived is not verified.

        Args:
            blob: `Attached.blob` of the peer's mover.

        Raises:
            UnavailableError: The memory is not filled.
        """
        life = self._life
        if life is None or life.is_ending:
            raise UnavailableError("there is no mover at the moment")
        owned = _Owned([piece.memory for piece in pieces], asyncio.Future())
        if self.given_up_bytes >= self._arena.num_bytes // GIVEN_UP_SHARE:
            raise UnavailableError("the mover still owns too much memory of earlier reads")
        number = next(self._ids)
        parts = tuple(
            (piece.address, piece.memory.metadata.address, piece.memory.get_size())
            for piece in pieces
        )
        life.owned[number] = owned
        for memory in owned.memory:
            memory.ref_count_up()
        if not self._send(life, Read(number, blob, parts)):
            self._settle(life, number, "it takes no requests")
        try:
            await asyncio.wait([owned.quiet], timeout=timeout_s)
        finally:
            if not owned.quiet.done():
                self._give_up(life, number)
        error = owned.quiet.result() if owned.quiet.done() else "no answer in time"
        if error:
            raise UnavailableError(f"mover: {error}")

    def _give_up(self, life: _Life, number: int) -> None:
        life.owned[number].is_given_up = True
        self._send(life, Cancel(number))

        def end_unless_quiet() -> None:
            if number in life.owned:
                logger.warning("mover does not let go of memory, ending it: read=%d", number)
                self._end(life)

        asyncio.get_running_loop().call_later(QUIET_S, end_unless_quiet)

    def _end(self, life: _Life) -> None:
        """Have the mover's supervisor kill it; then the connection ends."""
        life.is_ending = True
        with contextlib.suppress(OSError):
            life.connection.shutdown(socket.SHUT_WR)

    def _send(self, life: _Life, request: Request) -> bool:
        """Send a packet; False if the mover is dead, or does not read and is ended."""
        try:
            life.connection.send(_ENCODER.encode(request))
        except OSError:
            self._end(life)
            return False
        return True

    async def _live(self) -> None:
        """Serve one connection to the mover until the mover is dead."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.setblocking(False)
            attached: Report | None = None
            with contextlib.suppress(OSError):  # includes timeouts
                async with asyncio.timeout(ATTACH_S):
                    try:
                        await asyncio.get_running_loop().sock_connect(connection, str(self._path))
                    except OSError as exc:
                        self._log.log(
                            logging.WARNING, "no mover: path=%s error=%s", self._path, exc
                        )
                        return
                    connection.send(_ENCODER.encode(self._arena))
                    attached = await self._next(connection)
            if not isinstance(attached, Attached):
                await asyncio.sleep(REFUSED_S)
                return
            life = self._life = _Life(connection, attached)
            self.num_lives += 1
            logger.info("mover connected: path=%s", self._path)
            if self._lent_bytes:
                self._send(life, Serve(True))
            while (report := await self._next(connection)) is not None:
                if not isinstance(report, Quiet) or report.id not in life.owned:
                    self._end(life)  # and wait until it is dead
                    continue
                self._settle(life, report.id, report.error)
            self._life = None
            for number in list(life.owned):
                self._settle(life, number, "it has ended")
            life.ended.set()
            logger.info("mover ended: path=%s", self._path)

    @staticmethod
    async def _next(connection: socket.socket) -> Report | None:
        """Return the next report; None once the mover is dead. One that cannot be read is
        reported as a `Quiet` of no read.
        """
        try:
            packet = await asyncio.get_running_loop().sock_recv(connection, MAX_PACKET_BYTES)
        except ConnectionResetError:
            return None
        try:
            return _DECODER.decode(packet) if packet else None
        except msgspec.DecodeError:
            return _UNREADABLE

    @staticmethod
    def _settle(life: _Life, number: int, error: str) -> None:
        """Take memory back from the mover."""
        owned = life.owned.pop(number)
        owned.quiet.set_result(error)
        for memory in owned.memory:
            memory.ref_count_down()


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Report)
_UNREADABLE: Final = Quiet(0, "unreadable")
