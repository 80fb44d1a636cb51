"""One life of the mover: serves one connection of a sidecar, and ends with it.

    main thread: requests ──> a thread for each peer ──> reports
                         └──> a thread that serves peers

Every thread may hang in a library; the process may be killed at any time.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final

import msgspec
from lmcache_core.errors import UnavailableError
from lmcache_core.memory.shared import SharedArena, attach_shared_arena
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

from lmcache_mover.nixl import Memory, NixlError, ServingAgent
from lmcache_mover.peer import PeerReader

logger = logging.getLogger(__name__)

MAX_PEERS: Final = 64


class Worker:
    """Takes the requests of one connection.

    Args:
        connection: Connected, of the type SEQPACKET.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._peers: OrderedDict[bytes, PeerReader] = OrderedDict()
        self._reading: dict[int, PeerReader] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        """Serve until the sidecar is gone, or says what makes no sense.

        Raises:
            UnavailableError: The arena cannot be mapped.
        """
        attach = self._next()
        if not isinstance(attach, Attach):
            return
        arena = attach_shared_arena(Path(attach.path), attach.num_bytes, attach.generation)
        self._arena, self._memory = arena, _memory_of(arena)
        serving = ServingAgent(self._memory)
        self._report(Attached(serving.blob, self._memory.address))
        while (request := self._next()) is not None:
            match request:
                case Read():
                    self._read(request)
                case Cancel():
                    with self._lock:
                        if request.id in self._reading:
                            self._reading[request.id].cancel(request.id)
                case Serve():
                    serving.serve(request.is_on)
                case Attach():
                    return

    def _read(self, request: Read) -> None:
        for _, offset, length in request.pieces:
            if offset + length > self._memory.num_bytes:
                self._report(Quiet(request.id, "outside the arena"))
                return
        reader = self._peers.pop(request.blob, None)
        if reader is None:
            if len(self._peers) >= MAX_PEERS:
                _, oldest = self._peers.popitem(last=False)
                oldest.leave()
            reader = PeerReader(self._memory, request.blob, self._quiet)
        self._peers[request.blob] = reader
        with self._lock:
            self._reading[request.id] = reader
        reader.read(request)

    def _quiet(self, number: int, error: str) -> None:
        with self._lock:
            self._reading.pop(number, None)
        self._report(Quiet(number, error))

    def _report(self, report: Report) -> None:
        try:
            self._connection.sendall(msgspec.msgpack.encode(report))
        except OSError:
            os._exit(1)  # nobody hears this any more

    def _next(self) -> Request | None:
        """Return the next request; None once the sidecar is gone."""
        packet = self._connection.recv(MAX_PACKET_BYTES)
        return _DECODER.decode(packet) if packet else None


def main() -> None:
    """Serve the connection whose descriptor is the argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    threading.excepthook = _end_with_thread
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    code = 0
    try:
        Worker(connection).run()
    except (UnavailableError, NixlError, msgspec.DecodeError, OSError) as exc:
        logger.error("worker ends: error=%s", exc)
        code = 1
    os._exit(code)  # threads may hang in libraries


def _end_with_thread(failure: threading.ExceptHookArgs) -> None:
    logger.error("worker ends: thread=%s", failure.thread, exc_info=failure.exc_value)
    os._exit(1)


def _memory_of(arena: SharedArena) -> Memory:
    address = ctypes.addressof(ctypes.c_char.from_buffer(arena.store_view))
    return Memory(address, arena.size)


_DECODER: Final = msgspec.msgpack.Decoder(Request)


if __name__ == "__main__":
    main()
