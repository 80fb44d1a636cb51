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
from collections.abc import Sequence
from pathlib import Path

from lmcache_core.keys import ChunkKey
from lmcache_core.record import encode_head, payload_digest, raw_header
from lmcache_core.storage.remote import create_remote_backend

from tests.bench.engines import CHUNK_BYTES
from tests.bench.limits import SocketPair, payload, receive
from tests.bench.measure import GB, ROUNDS, Run, Seconds, in_turn, median_ratio
from tests.bench.report import WITH_ROUNDS, Findings, Section
from tests.bench.tiers import TierChunks
from tests.fixtures.service_process import running_service

NUM_CHUNKS = 8
TOTAL_BYTES = NUM_CHUNKS * CHUNK_BYTES
TIMEOUT_S = 120.0
SOCKET, LM, REST = "bare socket", "lm://, our client", "REST, bare caller"


class _BareRest:
    """REST by hand."""

    def __init__(self, port: int, keys: Sequence[ChunkKey]) -> None:
        self._port = port
        self._keys = keys
        self._payload = payload()
        self._digest = payload_digest(self._payload)
        self._buffer = bytearray(CHUNK_BYTES + (64 << 10))

    def put(self) -> None:
        with self._connected() as sock:
            for key in self._keys:
                digest = payload_digest(self._payload)
                header = raw_header(key.key, (CHUNK_BYTES,), "uint8", digest)
                head = encode_head(header, CHUNK_BYTES)
                length = len(head) + CHUNK_BYTES
                self._ask(sock, "PUT", key, f"Content-Length: {length}\r\n")
                sock.sendall(head)
                sock.sendall(self._payload)
                self._answer(sock, 201)

    def get(self) -> None:
        with self._connected() as sock:
            for key in self._keys:
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


def measure(run: Run, directory: Path, rounds: int = ROUNDS) -> Findings:
    """Measure everything.

    Args:
        directory: For the service's files.
    """
    environ = {"PORT": "0", "LM_PORT": "0", "MEMORY_GB": "0.5"}
    environ = {f"LMCACHE_STORAGE_{name}": value for name, value in environ.items()}
    pair = SocketPair()
    with (
        running_service("lmcache_storage", directory, environ) as service,
        asyncio.Runner() as runner,
    ):
        backend = create_remote_backend(
            f"lm://127.0.0.1:{service.ports['lm_port']}", timeout_s=TIMEOUT_S
        )
        lm = TierChunks(runner, backend, NUM_CHUNKS)
        rest = _BareRest(service.ports["port"], lm.keys(0))
        calls = {
            (SOCKET, "store"): lambda _: pair.move(NUM_CHUNKS),
            (SOCKET, "retrieve"): lambda _: pair.move(NUM_CHUNKS),
            (LM, "store"): lambda _: lm.put(0),
            (LM, "retrieve"): lambda _: lm.get(0),
            # What lm:// has stored is removed before REST stores it again.
            ("", ""): lambda _: lm.remove(0),
            (REST, "store"): lambda _: rest.put(),
            (REST, "retrieve"): lambda _: rest.get(),
        }
        seconds = dict(
            zip(
                calls,
                run(
                    "cache_storage over REST",
                    lambda: in_turn(*calls.values(), prepare=lambda _: lm.remove(0), rounds=rounds),
                ),
                strict=True,
            )
        )
        del seconds["", ""]
        lm.run(backend.close())
    pair.close()
    return Findings([table(seconds)], machine=WITH_ROUNDS)


def table(seconds: dict[tuple[str, str], Seconds]) -> Section:
    """Return rates, and shares as medians over rounds."""
    rows = []
    for (name, what), mine in seconds.items():
        rate = TOTAL_BYTES / statistics.median(mine) / GB
        shares = (f"{median_ratio(seconds[other, what], mine):.2f}" for other in (SOCKET, LM))
        rows.append((f"{name}: {what}", f"{rate:.2f}", *shares, ""))
    headings = ("what", "GB/s", "share of a bare socket", "share of lm://", "")
    return Section("cache_storage, 32 MiB a body, one connection over loopback", headings, rows)
