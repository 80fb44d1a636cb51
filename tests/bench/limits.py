"""References, what this machine does with plain calls: a torch copy, a raw socket, Redis' own
protocol; one thread each (a socket one at each end), the same bytes in the same blocks.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tests.bench.engines import CHUNK_BYTES, NUM_CHUNKS, SHARED_MEMORY, TOTAL_BYTES
from tests.bench.measure import ROUNDS, Figure, timed

SOCKET_BUFFER_BYTES = 4 << 20


def copy_work(num_bytes: int = TOTAL_BYTES) -> Callable[[int], object]:
    """Return a one-thread torch copy between touched memory."""
    source = torch.empty(num_bytes, dtype=torch.uint8).random_()
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    return lambda turn: target.copy_(source)


@contextmanager
def new_mapping_work(num_bytes: int) -> Iterator[Callable[[], float]]:
    """Yield a one-thread copy to touched memory of another process, mapped just before, so that
    each page of the mapping is entered when it is written. It returns the seconds of the copy.
    """
    source = torch.empty(num_bytes, dtype=torch.uint8).random_()
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        file.write(memoryview(source.numpy()))
        file.flush()

        def copy() -> float:
            with mmap.mmap(file.fileno(), num_bytes) as mapping:
                target = torch.frombuffer(mapping, dtype=torch.uint8)
                began = time.perf_counter()
                target.copy_(source)
                seconds = time.perf_counter() - began
                del target  # the mapping can be closed only then
            return seconds

        yield copy


class SocketPair:
    """Two ends of a TCP connection over loopback; moves chunks from one thread to another."""

    def __init__(self) -> None:
        self._payload = payload()
        self._target = memoryview(bytearray(CHUNK_BYTES))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._sender = socket.create_connection(listener.getsockname())
            self._receiver, _ = listener.accept()
        for end in (self._sender, self._receiver):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)

    def move(self, num_chunks: int) -> None:
        """`sendall` in one thread, `recv_into` in another."""
        thread = threading.Thread(
            target=lambda: [self._sender.sendall(self._payload) for _ in range(num_chunks)]
        )
        thread.start()
        for _ in range(num_chunks):
            receive(self._receiver, self._target)
        thread.join()

    def close(self) -> None:
        """Close both ends."""
        self._sender.close()
        self._receiver.close()


def socket_limit(rounds: int = ROUNDS, num_chunks: int = NUM_CHUNKS) -> Figure:
    """Measure a raw socket."""
    pair = SocketPair()
    seconds = timed(lambda turn: pair.move(num_chunks), rounds=rounds)
    pair.close()
    return Figure(
        "reference: raw socket, loopback, a thread at each end", num_chunks * CHUNK_BYTES, seconds
    )


def redis_limits(
    port: int, num_chunks: int = NUM_CHUNKS
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return SET and GET of every chunk's bytes over a raw socket; nothing is copied."""
    data = payload()
    target = memoryview(bytearray(CHUNK_BYTES))

    def store() -> None:
        with socket.create_connection(("127.0.0.1", port)) as raw:
            for i in range(num_chunks):
                name = b"raw:%d" % i
                raw.sendall(
                    b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, CHUNK_BYTES)
                )
                raw.sendall(data)
                raw.sendall(b"\r\n")
                assert _line(raw) == b"+OK"

    def retrieve() -> None:
        with socket.create_connection(("127.0.0.1", port)) as raw:
            for i in range(num_chunks):
                name = b"raw:%d" % i
                raw.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
                assert _line(raw) == b"$%d" % CHUNK_BYTES
                receive(raw, target)
                assert _line(raw) == b""

    return store, retrieve


def payload() -> memoryview:
    """Return the bytes of a chunk, a random mebibyte again and again."""
    return memoryview(bytearray(os.urandom(1 << 20)) * (CHUNK_BYTES >> 20))


def receive(source: socket.socket, target: memoryview) -> None:
    """Fill the target."""
    at = 0
    while at < len(target):
        num_bytes = source.recv_into(target[at:])
        if not num_bytes:
            raise ConnectionError("the connection ended")
        at += num_bytes


def _line(raw: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        got = raw.recv(1)
        if not got:
            raise ConnectionError("Redis closed the connection")
        line += got
    return line[:-2]
