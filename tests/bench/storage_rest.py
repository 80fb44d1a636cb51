"""The section `storage-rest` of docs/benchmarks.md: cache_storage over REST, by hand, and over
lm://; 32 MiB a body, one connection each, in turn with a bare socket.

The service runs as in its image: uvloop, httptools. The bare caller of REST does what a client must
and no more: it computes each digest before it sends, and compares each that it reads with its own,
in memory that it has touched before.
"""

from __future__ import annotations

import asyncio
import re
import socket
import statistics
from pathlib import Path
from typing import Any

from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory import ArenaAllocator, BytesBufferMemoryObj
from lmcache_core.record import Chunk, encode_head, payload_digest, raw_header
from lmcache_core.storage.remote import create_remote_backend

from tests.bench.engines import CHUNK_BYTES
from tests.bench.limits import SocketPair, payload, receive
from tests.bench.measure import GB, ROUNDS, Run, Seconds, in_turn, median_ratio
from tests.bench.report import Section
from tests.fixtures.service_process import running_service

NUM_CHUNKS = 8
TOTAL_BYTES = NUM_CHUNKS * CHUNK_BYTES
TIMEOUT_S = 120.0
SOCKET, LM, REST = "bare socket", "lm://, our client", "REST, bare caller"
KEYS = [
    ChunkKey.of("default", CacheEngineKey("vllm", "bench", 1, 0, f"{i:064x}"))
    for i in range(NUM_CHUNKS)
]


class _BareRest:
    """REST by hand."""

    def __init__(self, port: int, data: memoryview) -> None:
        self._port = port
        self._payload = data
        self._digest = payload_digest(data)
        self._buffer = bytearray(CHUNK_BYTES + (64 << 10))

    def put(self) -> None:
        with self._connected() as sock:
            for key in KEYS:
                head = _head_of(key, payload_digest(self._payload))
                length = len(head) + CHUNK_BYTES
                self._ask(sock, "PUT", key, f"Content-Length: {length}\r\n")
                sock.sendall(head)
                sock.sendall(self._payload)
                self._answer(sock, 201)

    def get(self) -> None:
        with self._connected() as sock:
            for key in KEYS:
                self._ask(sock, "GET", key)
                body = self._answer(sock, 200)
                if payload_digest(body[len(body) - CHUNK_BYTES :]) != self._digest:
                    raise AssertionError("other bytes came back")

    def _connected(self) -> socket.socket:
        """A new connection each time: the server ends those that rest for a few seconds."""
        return socket.create_connection(("127.0.0.1", self._port), TIMEOUT_S)

    @staticmethod
    def _ask(sock: socket.socket, method: str, key: ChunkKey, header: str = "") -> None:
        line = f"{method} /v1/chunks/{key.key.to_url()} HTTP/1.1\r\nHost: s\r\n{header}\r\n"
        sock.sendall(line.encode())

    def _answer(self, sock: socket.socket, expected: int) -> memoryview:
        target, num_bytes, end = memoryview(self._buffer), 0, -1
        while end < 0:
            num_bytes += sock.recv_into(target[num_bytes:])
            end = self._buffer.find(b"\r\n\r\n", 0, num_bytes)
        head = bytes(target[:end]).decode()
        if int(head.split(" ", 2)[1]) != expected:
            raise AssertionError(head)
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        end_of_body = end + 4 + (int(length[1]) if length else 0)
        receive(sock, target[num_bytes:end_of_body])
        return target[end + 4 : end_of_body]


class _Tier:
    """A remote tier, into arena memory."""

    def __init__(self, runner: asyncio.Runner, url: str, data: memoryview) -> None:
        self._run = runner.run
        self._payload = data
        self._backend = create_remote_backend(url, timeout_s=TIMEOUT_S)
        self._arena = ArenaAllocator.anonymous(TOTAL_BYTES + (1 << 20))
        self._run(self._backend.open())

    def put(self) -> None:
        chunks = []
        for key in KEYS:
            digest = payload_digest(self._payload)
            header = raw_header(key.key, (CHUNK_BYTES,), "uint8", digest)
            memory = BytesBufferMemoryObj(self._payload)
            chunks.append(Chunk(key, header, _head_of(key, digest), memory, "bench"))
        if not all(self._run(self._backend.batched_put(chunks))):
            raise AssertionError("a chunk was not stored")

    def get(self) -> None:
        for result in self._run(self._backend.batched_get(KEYS, self._allocate)):
            if not isinstance(result, Chunk):
                raise AssertionError(f"not served: {result}")
            result.release()

    def remove(self) -> None:
        self._run(self._backend.batched_remove(KEYS))

    def close(self) -> None:
        self._run(self._backend.close())

    def _allocate(self, num_bytes: int) -> Any:
        return self._arena.allocate((num_bytes,), None)


def measure(run: Run, directory: Path, rounds: int = ROUNDS) -> Section:
    """Measure everything.

    Args:
        directory: For the service's files.
    """
    data = payload()
    environ = {"PORT": "0", "LM_PORT": "0", "MEMORY_GB": "0.5"}
    environ = {f"LMCACHE_STORAGE_{name}": value for name, value in environ.items()}
    pair = SocketPair()
    with (
        running_service("lmcache_storage", directory, environ) as service,
        asyncio.Runner() as runner,
    ):
        lm = _Tier(runner, f"lm://127.0.0.1:{service.ports['lm_port']}", data)
        rest = _BareRest(service.ports["port"], data)
        calls = {
            (SOCKET, "store"): lambda: pair.move(NUM_CHUNKS),
            (SOCKET, "retrieve"): lambda: pair.move(NUM_CHUNKS),
            (LM, "store"): lm.put,
            (LM, "retrieve"): lm.get,
            # What lm:// has stored is removed before REST stores it again.
            (REST, "store"): rest.put,
            (REST, "retrieve"): rest.get,
        }
        works = [lambda _, call=call: call() for call in calls.values()]
        removing = [*works[:4], lambda _: lm.remove(), *works[4:]]
        seconds = run(
            "cache_storage over REST",
            lambda: in_turn(*removing, prepare=lambda _: lm.remove(), rounds=rounds),
        )
        del seconds[4]
        lm.close()
    pair.close()
    return table(dict(zip(calls, seconds, strict=True)))


def table(seconds: dict[tuple[str, str], Seconds]) -> Section:
    """Return rates, and shares as medians over rounds."""
    rows = []
    for (name, what), mine in seconds.items():
        rate = TOTAL_BYTES / statistics.median(mine) / GB
        shares = (f"{median_ratio(seconds[other, what], mine):.2f}" for other in (SOCKET, LM))
        rows.append((f"{name}: {what}", f"{rate:.2f}", *shares, ""))
    headings = ("what", "GB/s", "share of a bare socket", "share of lm://", "")
    return Section("cache_storage, 32 MiB a body, one connection over loopback", headings, rows)


def _head_of(key: ChunkKey, digest: bytes) -> bytes:
    """Return the head of that chunk's record."""
    return encode_head(raw_header(key.key, (CHUNK_BYTES,), "uint8", digest), CHUNK_BYTES)
