"""What this machine can do: a torch copy, a raw socket, raw files; one thread each, the same
bytes in the same blocks.
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

from tests.bench.measure import ROUNDS, Figure, timed
from tests.bench.shape import CHUNK_BYTES, NUM_CHUNKS, TOTAL_BYTES

SOCKET_BUFFER_BYTES = 4 << 20


def copy_work(num_bytes: int = TOTAL_BYTES) -> Callable[[int], object]:
    """One-thread torch copy between touched memory, to be measured in turn with something else."""
    source = torch.empty(num_bytes, dtype=torch.uint8).random_()
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    return lambda turn: target.copy_(source)


@contextmanager
def new_mapping_work(num_bytes: int) -> Iterator[Callable[[], float]]:
    """A one-thread copy to touched memory of another process, mapped just before: each page of the
    mapping is entered when it is written to. It returns the seconds of the copy.
    """
    source = torch.empty(num_bytes, dtype=torch.uint8).random_()
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
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


def copy_limit(copy: Callable[[int], object]) -> Figure:
    """That copy by itself."""
    return Figure("limit: torch copy, one thread", TOTAL_BYTES, timed(copy))


def socket_limit(rounds: int = ROUNDS, num_chunks: int = NUM_CHUNKS) -> Figure:
    """`sendall` in one thread, `recv_into` in another, over loopback TCP."""
    payload = memoryview(bytearray(os.urandom(1 << 20)) * (CHUNK_BYTES >> 20))
    target = memoryview(bytearray(CHUNK_BYTES))
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    receiver, _ = listener.accept()
    for end in (sender, receiver):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)

    def transfer(turn: int) -> None:
        thread = threading.Thread(
            target=lambda: [sender.sendall(payload) for _ in range(num_chunks)]
        )
        thread.start()
        for _ in range(num_chunks):
            at = 0
            while at < CHUNK_BYTES:
                at += receiver.recv_into(target[at:])
        thread.join()

    seconds = timed(transfer, rounds=rounds)
    for end in (sender, receiver, listener):
        end.close()
    return Figure("limit: raw socket, loopback", num_chunks * CHUNK_BYTES, seconds)


def redis_limits(
    port: int, num_chunks: int = NUM_CHUNKS
) -> tuple[Callable[[], None], Callable[[], None]]:
    """SET and GET of every chunk's bytes over a raw socket; nothing is copied."""
    payload = memoryview(bytearray(os.urandom(1 << 20)) * (CHUNK_BYTES >> 20))
    target = memoryview(bytearray(CHUNK_BYTES))

    def store() -> None:
        with socket.create_connection(("127.0.0.1", port)) as raw:
            for i in range(num_chunks):
                name = b"raw:%d" % i
                raw.sendall(
                    b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, CHUNK_BYTES)
                )
                raw.sendall(payload)
                raw.sendall(b"\r\n")
                assert _line(raw) == b"+OK"

    def retrieve() -> None:
        with socket.create_connection(("127.0.0.1", port)) as raw:
            for i in range(num_chunks):
                name = b"raw:%d" % i
                raw.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
                assert _line(raw) == b"$%d" % CHUNK_BYTES
                at = 0
                while at < CHUNK_BYTES:
                    at += raw.recv_into(target[at:])
                assert _line(raw) == b""

    return store, retrieve


def _line(raw: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        got = raw.recv(1)
        if not got:
            raise ConnectionError("Redis closed the connection")
        line += got
    return line[:-2]
