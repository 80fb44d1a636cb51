"""cache_storage over REST, by hand, and over lm://: 32 MiB a body, one connection each, in turn,
both held against a bare socket.

The service runs as in its image: uvloop, httptools. The bare caller of REST does what a client must
and no more: it computes each digest before it sends, and compares each that it reads with its own,
in memory that it has touched before.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory import ArenaAllocator, BytesBufferMemoryObj
from lmcache_core.memory.base import MemoryObj
from lmcache_core.record import Chunk, encode_head, payload_digest, raw_header
from lmcache_core.storage.base import StorageBackend
from lmcache_core.storage.remote import create_remote_backend

from tests.bench.measure import GB, ROUNDS
from tests.bench.report import Section
from tests.fixtures.service_process import running_service

CHUNK_BYTES = 32 << 20
NUM_CHUNKS = 8
TOTAL_BYTES = NUM_CHUNKS * CHUNK_BYTES
TIMEOUT_S = 120.0

KEYS = [
    ChunkKey.of("default", CacheEngineKey("vllm", "bench", 1, 0, f"{i:064x}"))
    for i in range(NUM_CHUNKS)
]


class Caller:
    """What is timed: putting and getting all chunks, which are taken away again between rounds."""

    def put(self) -> None:
        """Store everything."""
        raise NotImplementedError

    def get(self) -> None:
        """Read everything."""
        raise NotImplementedError


class BareSocket(Caller):
    """As many bytes from one thread to another."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        listener = socket.create_server(("127.0.0.1", 0))
        self._sender = socket.create_connection(listener.getsockname())
        self._receiver, _ = listener.accept()
        listener.close()
        self._target = memoryview(bytearray(CHUNK_BYTES))

    def put(self) -> None:
        """Move them."""
        thread = threading.Thread(
            target=lambda: [self._sender.sendall(self._payload) for _ in range(NUM_CHUNKS)]
        )
        thread.start()
        for _ in range(NUM_CHUNKS):
            receive(self._receiver, self._target)
        thread.join()

    get = put


class BareRest(Caller):
    """REST by hand."""

    def __init__(self, port: int, payload: bytes) -> None:
        self._port = port
        self._socket = socket.socket()
        self._payload = payload
        self._digest = payload_digest(payload)
        self._target = memoryview(bytearray(CHUNK_BYTES + (64 << 10)))

    def put(self) -> None:
        """See `Caller.put`."""
        self._connect()
        for key in KEYS:
            head = head_of(key, payload_digest(self._payload))
            lines = (
                f"PUT /v1/chunks/{key.key.to_url()} HTTP/1.1\r\nHost: s\r\nContent-Length:"
                f" {len(head) + CHUNK_BYTES}\r\n\r\n"
            )
            self._socket.sendall(lines.encode() + head)
            self._socket.sendall(self._payload)
            self._answer(201)

    def get(self) -> None:
        """See `Caller.get`."""
        self._connect()
        for key in KEYS:
            self._socket.sendall(
                f"GET /v1/chunks/{key.key.to_url()} HTTP/1.1\r\nHost: s\r\n\r\n".encode()
            )
            body = self._answer(200)
            if payload_digest(body[len(body) - CHUNK_BYTES :]) != self._digest:
                raise AssertionError("other bytes came back")

    def _connect(self) -> None:
        """Anew each time: the server ends connections that rest for a few seconds."""
        self._socket.close()
        self._socket = socket.create_connection(("127.0.0.1", self._port), TIMEOUT_S)

    def _answer(self, expected: int) -> memoryview:
        num_bytes, end = 0, -1
        while end < 0:
            num_bytes += self._socket.recv_into(self._target[num_bytes:])
            end = self._target.obj.find(b"\r\n\r\n", 0, num_bytes)  # type: ignore[attr-defined]
        head = bytes(self._target[:end]).decode()
        if int(head.split(" ", 2)[1]) != expected:
            raise AssertionError(head)
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        end_of_body = end + 4 + (int(length[1]) if length else 0)
        receive(self._socket, self._target[num_bytes:end_of_body])
        return self._target[end + 4 : end_of_body]


class Tier(Caller):
    """A remote tier, into arena memory."""

    def __init__(self, runner: asyncio.Runner, url: str, payload: bytes) -> None:
        self._runner = runner
        self._payload = payload
        self._backend: StorageBackend = create_remote_backend(url, timeout_s=TIMEOUT_S)
        self._arena = ArenaAllocator.anonymous(TOTAL_BYTES + (1 << 20))
        runner.run(self._backend.open())

    def put(self) -> None:
        """See `Caller.put`."""
        chunks = []
        for key in KEYS:
            header = raw_header(key.key, (CHUNK_BYTES,), "uint8", payload_digest(self._payload))
            chunks.append(
                Chunk(
                    key,
                    header,
                    encode_head(header, CHUNK_BYTES),
                    BytesBufferMemoryObj(self._payload),
                    "bench",
                )
            )
        if not all(self._runner.run(self._backend.batched_put(chunks))):
            raise AssertionError("a chunk was not stored")

    def get(self) -> None:
        """See `Caller.get`."""
        for result in self._runner.run(self._backend.batched_get(KEYS, self._allocate)):
            if not isinstance(result, Chunk):
                raise AssertionError(f"not served: {result}")
            result.release()

    def remove(self) -> None:
        """Take everything away."""
        self._runner.run(self._backend.batched_remove(KEYS))

    def close(self) -> None:
        """End the connections."""
        self._runner.run(self._backend.close())

    def _allocate(self, num_bytes: int) -> MemoryObj | None:
        return self._arena.allocate((num_bytes,), None)


def measure(run: Callable[[str, Callable[[], Any]], Any], directory: Path) -> list[Section]:
    """Everything, as one table.

    Args:
        run: Runs a part and shows its name.
        directory: For the service's files.
    """
    payload = os.urandom(1 << 20) * (CHUNK_BYTES >> 20)
    environ = {"PORT": "0", "LM_PORT": "0", "MEMORY_GB": "0.5"}
    with (
        running_service(
            "lmcache_storage",
            directory,
            {f"LMCACHE_STORAGE_{name}": value for name, value in environ.items()},
        ) as service,
        asyncio.Runner() as runner,
    ):
        lm = Tier(runner, f"lm://127.0.0.1:{service.ports['lm_port']}", payload)
        callers = {
            "bare socket": BareSocket(payload),
            "lm://, our client": lm,
            "REST, bare caller": BareRest(service.ports["port"], payload),
        }
        seconds = run("cache_storage over REST", lambda: in_rounds(callers, lm))
        lm.close()
    return [as_section(seconds)]


def in_rounds(callers: dict[str, Caller], lm: Tier) -> dict[tuple[str, str], list[float]]:
    """Seconds of each round of each caller's put and get, one caller after the other in every
    round; the first does not count.
    """
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(ROUNDS + 1):
        for name, caller in callers.items():
            lm.remove()
            for what, work in (("store", caller.put), ("retrieve", caller.get)):
                begin = time.perf_counter()
                work()
                if turn:
                    seconds.setdefault((name, what), []).append(time.perf_counter() - begin)
    return seconds


def as_section(seconds: dict[tuple[str, str], list[float]]) -> Section:
    """As a table; shares are medians over rounds."""
    rows = []
    for (name, what), mine in seconds.items():
        shares = [
            statistics.median(
                theirs / ours for theirs, ours in zip(seconds[other, what], mine, strict=True)
            )
            for other in ("bare socket", "lm://, our client")
        ]
        rate = TOTAL_BYTES / statistics.median(mine) / GB
        low, high = TOTAL_BYTES / max(mine) / GB, TOTAL_BYTES / min(mine) / GB
        rows.append(
            (
                f"{name}: {what}",
                f"{rate:.2f}",
                f"{low:.2f} … {high:.2f}",
                *(f"{share:.2f}" for share in shares),
                "",
            )
        )
    headings = (
        "what",
        "GB/s",
        "slowest … fastest",
        "share of a bare socket",
        "share of lm://",
        "",
    )
    return Section("cache_storage, 32 MiB a body, one connection over loopback", headings, rows)


def head_of(key: ChunkKey, digest: bytes) -> bytes:
    """The head of that chunk's record."""
    return encode_head(raw_header(key.key, (CHUNK_BYTES,), "uint8", digest), CHUNK_BYTES)


def receive(source: socket.socket, target: memoryview) -> None:
    """Fill the target."""
    at = 0
    while at < len(target):
        num_bytes = source.recv_into(target[at:])
        if not num_bytes:
            raise AssertionError("the connection ended")
        at += num_bytes
