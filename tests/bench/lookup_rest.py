"""The lookup service over REST: how soon the longest prefix of 400 chunks is known, and how often a second, held against bare sockets.

The service runs as in its image: uvloop, httptools, an index in a real Redis on loopback. Callers are processes of their own that send
bytes made beforehand and compare every answer with the first; they and Redis share the machine's cores with the service.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import msgspec
from lmcache_core.lookup import LookupClient, StoreEvent
from lmcache_core.lookup.requests import JSON, MSGPACK, ChunksRequest, PackedChunksRequest, pack_ids
from lmcache_core.lookup.runs import PackedLookupAnswer

from tests.bench.report import Section
from tests.fixtures.redis_server import running_redis
from tests.fixtures.service_process import running_service

NUM_CHUNKS = 400
NUM_HOLDERS = 2
NUM_CALLERS = 4
CONNECTIONS_PER_CALLER = 4
NUM_TIMED = 1000
RATE_S = 5.0
GOAL_MS = 5.0
GOAL_PER_S = 2000
CHUNK_BYTES = 32 << 20
WORKERS = (1, 2)


@dataclass(frozen=True)
class Question:
    """One HTTP request, as it goes over the wire."""

    name: str
    data: bytes


def question(name: str, media_type: str, body: bytes) -> Question:
    """A lookup as a program would send it."""
    head = f"POST /v1/lookup HTTP/1.1\r\nhost: lookup\r\ncontent-type: {media_type}\r\naccept: {media_type}\r\ncontent-length: {len(body)}"
    return Question(name, head.encode() + b"\r\n\r\n" + body)


def measure(run: Callable[[str, Callable[[], list[Section]]], list[Section]], directory: Path) -> list[Section]:
    """Latency and rate, for one worker and for two."""
    return run("lookups over REST", lambda: _measure(directory))


def _measure(directory: Path) -> list[Section]:
    chunk_ids = [os.urandom(16) for _ in range(NUM_CHUNKS)]
    asked = (
        question("MessagePack", MSGPACK, msgspec.msgpack.encode(PackedChunksRequest(pack_ids(chunk_ids)))),
        question("JSON", JSON, msgspec.json.encode(ChunksRequest([chunk_id.hex() for chunk_id in chunk_ids]))),
    )
    times: list[tuple[str, ...]] = []
    rates: dict[str, list[float]] = {}
    with running_redis() as redis:
        for workers in WORKERS:
            environ = {"PORT": "0", "REDIS_URL": redis.url, "WORKERS": str(workers), "REDIS_TIMEOUT_MS": "2000"}
            with running_service(
                "lmcache_lookup", directory, {f"LMCACHE_LOOKUP_{name}": value for name, value in environ.items()}
            ) as service:
                asyncio.run(_fill(service.url, chunk_ids))
                port = service.ports["port"]
                answers = {one.name: _check(one, port) for one in asked}
                for one in asked:
                    if workers == 1:
                        times.append(_time_row(f"400 chunks, {one.name}", _timed(one, port), f"{len(answers[one.name]):,} bytes"))
                    rates.setdefault(one.name, []).append(_rate(one, port))
                if workers == 1:
                    times.append(_time_row("400 chunks, our client", asyncio.run(_timed_client(service.url, chunk_ids)), "httpx beside it"))
            for one in asked:
                with _echo(answers[one.name], len(one.data), workers) as port:
                    if workers == 1:
                        times.append(_time_row(f"bare echo of the same bytes, {one.name}", _timed(one, port), "uvloop, nothing parsed"))
                    rates.setdefault(f"bare echo, {one.name}", []).append(_rate(one, port))
    rows = [
        (name, *(f"{rate:,.0f}" for rate in found), f"{GOAL_PER_S:,}" if "echo" not in name else "", "") for name, found in rates.items()
    ]
    callers = f"{NUM_CALLERS} processes, {NUM_CALLERS * CONNECTIONS_PER_CALLER} connections"
    return [
        Section("Lookup over REST, Redis on loopback", ("what", "ms", "fastest … nine in ten", "goal", "note"), times),
        Section(f"Lookups of {NUM_CHUNKS} chunks a second, {callers}", ("what", "1 worker", "2 workers", "goal", "note"), rows),
    ]


async def _fill(url: str, chunk_ids: Sequence[bytes]) -> None:
    client = LookupClient(url, timeout_s=10)
    await client.open()
    for number in range(NUM_HOLDERS):
        name = f"pod-{number}"
        incarnation = time.time_ns()
        await client.renew_instance(name, incarnation=incarnation, kind="sidecar", ttl_ms=300_000)
        events = [StoreEvent("store", chunk_id.hex(), "Hot", CHUNK_BYTES) for chunk_id in chunk_ids]
        await client.send_events(name, incarnation=incarnation, first_sequence=0, events=events)
    await client.close()


def _check(one: Question, port: int) -> bytes:
    """The whole answer, after a look at what it says."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(one.data)
        answer = _read(sock)
    body = answer.partition(b"\r\n\r\n")[2]
    if one.name == "MessagePack":
        prefix = msgspec.msgpack.decode(body, type=PackedLookupAnswer).unpack()
        found = (prefix.num_prefix, {len(holders) for holders in prefix.holders})
    else:
        text = msgspec.json.decode(body)
        found = (text["num_prefix"], {len(holders) for holders in text["holders"]})
    if found != (NUM_CHUNKS, {NUM_HOLDERS}):
        raise AssertionError(f"the prefix and its holders were not found: {found}")
    return answer


def _read(sock: socket.socket) -> bytes:
    """One answer, which has a Content-Length."""
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += _more(sock)
    head = bytes(data[:end]).lower()
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(data) < end + 4 + length:
        data += _more(sock)
    return bytes(data)


def _more(sock: socket.socket) -> bytes:
    piece = sock.recv(1 << 17)
    if not piece:
        raise ConnectionError("the service hung up")
    return piece


def _timed(one: Question, port: int) -> list[float]:
    """Milliseconds of each call, one after the other over one connection."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = []
        for _ in range(NUM_TIMED):
            begin = time.perf_counter()
            sock.sendall(one.data)
            _read(sock)
            found.append((time.perf_counter() - begin) * 1000)
        return found


async def _timed_client(url: str, chunk_ids: Sequence[bytes]) -> list[float]:
    client = LookupClient(url, timeout_s=10)
    await client.open()
    found = []
    for _ in range(NUM_TIMED):
        begin = time.perf_counter()
        answer = await client.lookup(chunk_ids)
        found.append((time.perf_counter() - begin) * 1000)
        if answer.num_prefix != NUM_CHUNKS:
            raise AssertionError("the prefix was not found")
    await client.close()
    return found


def _rate(one: Question, port: int) -> float:
    """Answers a second that all callers get together."""
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    callers = []
    for _ in range(NUM_CALLERS):
        mine, theirs = context.Pipe()
        caller = context.Process(target=_call_for_ever, args=(one.data, port, theirs), daemon=True)
        caller.start()
        ends.append(mine)
        callers.append(caller)
    for end in ends:
        end.recv_bytes()
    for end in ends:
        end.send_bytes(b"begin")
    total = sum(float(end.recv_bytes()) for end in ends)
    for caller in callers:
        caller.join()
    return total


def _call_for_ever(data: bytes, port: int, parent: Connection) -> None:
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS_PER_CALLER)]
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(data)
    expected = {_body(_read(sock)) for sock in socks}
    parent.send_bytes(b"ready")
    parent.recv_bytes()
    num_answers = 0
    begin = time.perf_counter()
    for sock in socks:
        sock.sendall(data)
    while time.perf_counter() - begin < RATE_S:
        for sock in socks:
            if _body(_read(sock)) not in expected:
                raise AssertionError("an answer differs from the first")
            sock.sendall(data)
            num_answers += 1
    parent.send_bytes(str(num_answers / (time.perf_counter() - begin)).encode())


def _body(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


@contextmanager
def _echo(answer: bytes, num_bytes: int, workers: int) -> Iterator[int]:
    """Processes that send `answer` for every `num_bytes` that come: what is left when nothing is done."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_serve_echo, args=(answer, num_bytes, port), daemon=True) for _ in range(workers)]
        for process in processes:
            process.start()
        try:
            _await_listener(port)
            yield port
        finally:
            for process in processes:
                process.kill()
                process.join()


def _await_listener(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            time.sleep(0.3)  # for the other processes
            return


class _Echo(asyncio.Protocol):
    def __init__(self, answer: bytes, num_bytes: int) -> None:
        self._answer = answer
        self._num_bytes = num_bytes
        self._num_read = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._num_read += len(data)
        while self._num_read >= self._num_bytes:
            self._num_read -= self._num_bytes
            self._transport.write(self._answer)


def _serve_echo(answer: bytes, num_bytes: int, port: int) -> None:
    import uvloop

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Echo(answer, num_bytes), "127.0.0.1", port, reuse_port=True)
        await server.serve_forever()

    uvloop.run(serve())


def _time_row(name: str, found: Sequence[float], note: str) -> tuple[str, ...]:
    goal = "" if "echo" in name else f"{GOAL_MS:g}"
    nine_in_ten = statistics.quantiles(found, n=10)[-1]
    return name, f"{statistics.median(found):.2f}", f"{min(found):.2f} … {nine_in_ten:.2f}", goal, note
