"""The sections `lookup` and `lookup-rest` of docs/benchmarks.md: the index of chunks in Redis, and
the service in front of it.

The index is read in turn with a plain redis-py client that gets as many values of as many bytes by
one MGET. The service runs as in its image: uvloop, httptools. Its callers are processes that send
bytes made beforehand and compare every answer with the first; they and Redis share the machine's
cores with the service.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import redis
from lmcache_core.lookup import LookupClient, StoreEvent
from lmcache_core.lookup.messages import (
    JSON,
    MSGPACK,
    ChunksRequest,
    PackedChunksRequest,
    PackedLookupAnswer,
    pack_ids,
)
from lmcache_lookup.index import EventBatch, IndexEvent, LeaseClaim, LookupIndex
from lmcache_lookup.index.packing import NUM_BUCKETS, bucket_key, bucket_of
from lmcache_lookup.index.redis_index import RedisIndex, RedisIndexOptions
from lmcache_servicekit.redis_client import RedisAccess

from tests.bench.measure import median_ms
from tests.bench.report import MACHINE, Findings, Section
from tests.fixtures.redis_cluster import NUM_MASTERS, running_cluster
from tests.fixtures.redis_server import RedisServer, running_redis
from tests.fixtures.service_process import running_service

TENANT = "acme"
INSTANCES = ("sidecar-0", "sidecar-1")
"""Both hold every chunk."""
NUM_CHUNKS, NUM_CHUNKS_IN_CLUSTER = 1_000_000, 200_000
NUM_ASKED = 400
NUM_ROUNDS = 201
BATCH_EVENTS = 2048
VALUE_BYTES = 49
"""Two holders, in the tiers `hot` and `disk`."""
GOAL_BYTES = 250
OPTIONS = RedisIndexOptions(read_timeout_s=10, write_timeout_s=30)

PODS = ("pod-0", "pod-1")
"""Both hold every chunk that is looked up over REST."""
NUM_TIMED = 1000
GOAL_MS, GOAL_PER_S = 5, 2000
NUM_CALLERS, CONNECTIONS_PER_CALLER = 4, 4
NUM_WINDOWS, WINDOW_S = 10, 0.5
CHUNK_BYTES = 32 << 20

Row = tuple[str, ...]


# --- The index ------------------------------------------------------------------------------------


def measure_index() -> Findings:
    """Measure one server, and a cluster of three masters with a replica each; takes half a
    minute.
    """
    with running_redis() as server, server.client() as plain:
        time_rows, memory_rows = _of_index("one server", server.url, [server], NUM_CHUNKS, plain)
    with running_cluster() as cluster:
        masters = cluster.servers[:NUM_MASTERS]
        of_cluster = _of_index("cluster", cluster.url, masters, NUM_CHUNKS_IN_CLUSTER, None)
    headings = ("what", "bytes a chunk", "goal", "note")
    title = "Lookup index in Redis: memory, both holders of each chunk included"
    sections = [
        Section(
            "Lookup index in Redis: time",
            ("what", "figure", "goal", "note"),
            [*time_rows, *of_cluster[0]],
        ),
        Section(title, headings, [*memory_rows, *of_cluster[1]]),
    ]
    return Findings(sections, machine=f"{MACHINE} Medians of {NUM_ROUNDS} rounds.")


def _of_index(
    where: str, url: str, servers: Sequence[RedisServer], num_chunks: int, plain: redis.Redis | None
) -> tuple[list[Row], list[Row]]:
    """Fill an index and read it; return rows of time and of memory.

    Args:
        plain: Client of the one server; None for a cluster.
    """
    empty = _used_bytes(servers)
    index = RedisIndex(RedisAccess.parse(url), OPTIONS)
    with asyncio.Runner() as runner:
        chunk_ids, events_per_s = runner.run(_fill_index(index, num_chunks))
        used = (_used_bytes(servers) - empty) / num_chunks
        name = where if plain is not None else f"{where}, its masters"
        memory = [
            (
                f"{name}: {num_chunks:,} chunks",
                f"{used:.0f}",
                f"{GOAL_BYTES}",
                "used_memory of INFO, net",
            )
        ]
        if plain is not None:
            memory.append(_small_buckets(plain, chunk_ids[: 256 * NUM_BUCKETS]))
        reads, plain_reads = runner.run(_read_index(index, chunk_ids, plain))
        runner.run(index.close())
    note = "three servers asked at once"
    if plain_reads:
        note = f"{median_ms(plain_reads)} ms: redis-py, one MGET, no holders"
    what = f"{where}: holders of {NUM_ASKED} of {num_chunks:,} chunks"
    goal = "about 1 ms" if plain is not None else ""
    events = f"{events_per_s:,.0f} a second"
    return [
        (what, f"{median_ms(reads)} ms", goal, note),
        (f"{where}: events", events, "", f"batches of {BATCH_EVENTS}"),
    ], memory


async def _fill_index(index: LookupIndex, num_chunks: int) -> tuple[list[bytes], float]:
    """Store every chunk for each instance, from one caller that waits for each batch; return the
    chunks, and the events that were taken in a second.
    """
    chance = random.Random(1)
    chunk_ids = [chance.randbytes(16) for _ in range(num_chunks)]
    began = time.perf_counter()
    for number, (instance, tier) in enumerate(zip(INSTANCES, ("hot", "disk"), strict=True)):
        incarnation = 1_800_000_000_000_000_000 + number
        await index.renew(TENANT, LeaseClaim(instance, incarnation, "sidecar", 3_600_000))
        for first in range(0, num_chunks, BATCH_EVENTS):
            events = [
                IndexEvent("store", TENANT, chunk_id, tier, CHUNK_BYTES)
                for chunk_id in chunk_ids[first : first + BATCH_EVENTS]
            ]
            state = await index.apply(TENANT, EventBatch(instance, incarnation, first, events))
            assert state.next_sequence == first + len(events), "the index has taken the batch"
    return chunk_ids, len(INSTANCES) * num_chunks / (time.perf_counter() - began)


async def _read_index(
    index: LookupIndex, chunk_ids: Sequence[bytes], plain: redis.Redis | None
) -> tuple[list[float], list[float]]:
    """Return the seconds of each read, and of the plain client's reads in turn with them."""
    chance = random.Random(2)
    keys = [f"plain:{number}" for number in range(NUM_ASKED)]
    if plain is not None:
        plain.mset(dict.fromkeys(keys, b"v" * VALUE_BYTES))
    seconds, plain_seconds = [], []
    for _ in range(NUM_ROUNDS):
        question = chance.sample(chunk_ids, NUM_ASKED)
        began = time.perf_counter()
        found = await index.holders(TENANT, question)
        seconds.append(time.perf_counter() - began)
        assert all(len(holders) == len(INSTANCES) for holders in found), "every chunk has both"
        if plain is not None:
            began = time.perf_counter()
            plain.mget(keys)
            plain_seconds.append(time.perf_counter() - began)
    return seconds, plain_seconds


def _small_buckets(plain: redis.Redis, chunk_ids: Sequence[bytes]) -> Row:
    """What a chunk takes while the buckets are small."""
    pipeline = plain.pipeline(transaction=False)
    for chunk_id in chunk_ids:
        key = f"small:{bucket_key(TENANT, bucket_of(chunk_id))}"
        pipeline.hset(key, chunk_id, b"v" * VALUE_BYTES)
    pipeline.execute()
    keys = [f"small:{bucket_key(TENANT, bucket)}" for bucket in range(NUM_BUCKETS)]
    used = sum(plain.memory_usage(key, samples=0) or 0 for key in keys)
    note = "MEMORY USAGE; buckets of up to 512 chunks are packed more tightly"
    return (f"one server: {len(chunk_ids):,} chunks", f"{used / len(chunk_ids):.0f}", "", note)


def _used_bytes(servers: Sequence[RedisServer]) -> int:
    used = 0
    for server in servers:
        with server.client() as client:
            used += int(client.info("memory")["used_memory"])
    return used


# --- The service over REST ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Question:
    """A lookup as it goes over the wire.

    Attributes:
        name: Of its encoding.
    """

    name: str
    data: bytes

    @classmethod
    def of(cls, name: str, media_type: str, body: bytes) -> _Question:
        head = (
            f"POST /v1/lookup HTTP/1.1\r\nhost: lookup\r\ncontent-type: {media_type}\r\naccept:"
            f" {media_type}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return cls(name, head.encode() + body)


def measure_rest(directory: Path) -> Findings:
    """Measure how soon the longest prefix of 400 chunks is known, and how often a second."""
    chunk_ids = [os.urandom(16) for _ in range(NUM_ASKED)]
    packed = msgspec.msgpack.encode(PackedChunksRequest(pack_ids(chunk_ids)))
    plain = msgspec.json.encode(ChunksRequest([chunk_id.hex() for chunk_id in chunk_ids]))
    times: list[Row] = []
    rates: list[Row] = []
    with running_redis() as server:
        environ = {"PORT": "0", "REDIS_URL": server.url, "REDIS_TIMEOUT_MS": "2000"}
        environ = {f"LMCACHE_LOOKUP_{name}": value for name, value in environ.items()}
        with running_service("lmcache_lookup", directory, environ) as service:
            asyncio.run(_announce(service.url, chunk_ids))
            port = service.ports["port"]
            for asked in (
                _Question.of("MessagePack", MSGPACK, packed),
                _Question.of("JSON", JSON, plain),
            ):
                seconds, num_bytes = _timed_answers(asked, port)
                note = f"{num_bytes:,} bytes"
                times.append((f"400 chunks, {asked.name}", median_ms(seconds), f"{GOAL_MS}", note))
                windows = _windows(asked, port)
                text = f"{statistics.median(windows):,.0f} ({max(windows):,.0f})"
                rates.append((asked.name, text, f"{GOAL_PER_S:,}", ""))
            seconds = asyncio.run(_timed_client(service.url, chunk_ids))
            times.append(("400 chunks, our client", median_ms(seconds), f"{GOAL_MS}", "with httpx"))
    title = (
        f"Lookups of {NUM_ASKED} chunks a second: median (best) of {NUM_WINDOWS} windows;"
        f" {NUM_CALLERS} processes, {NUM_CALLERS * CONNECTIONS_PER_CALLER} connections"
    )
    sections = [
        Section("Lookup over REST, Redis on loopback", ("what", "ms", "goal", "note"), times),
        Section(title, ("what", "a second", "goal", ""), rates),
    ]
    return Findings(sections)


async def _announce(url: str, chunk_ids: Sequence[bytes]) -> None:
    client = LookupClient(url, timeout_s=10)
    await client.open()
    for name in PODS:
        incarnation = time.time_ns()
        await client.renew_instance(name, incarnation=incarnation, kind="sidecar", ttl_ms=300_000)
        events = [StoreEvent("store", chunk_id, "memory", CHUNK_BYTES) for chunk_id in chunk_ids]
        await client.send_events(name, incarnation=incarnation, first_sequence=0, events=events)
    await client.close()


def _timed_answers(asked: _Question, port: int) -> tuple[list[float], int]:
    """Ask again and again over one connection; return the seconds of each call, and the size of an
    answer, whose content is checked once.
    """
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(asked.data)
        answer = _read_answer(sock)
        _check(asked, _body(answer))
        seconds = []
        for _ in range(NUM_TIMED):
            began = time.perf_counter()
            sock.sendall(asked.data)
            _read_answer(sock)
            seconds.append(time.perf_counter() - began)
    return seconds, len(answer)


def _check(asked: _Question, body: bytes) -> None:
    if asked.name == "MessagePack":
        prefix = msgspec.msgpack.decode(body, type=PackedLookupAnswer).unpack()
        found = (prefix.num_prefix, {len(holders) for holders in prefix.holders})
    else:
        text = msgspec.json.decode(body)
        found = (text["num_prefix"], {len(holders) for holders in text["holders"]})
    if found != (NUM_ASKED, {len(PODS)}):
        raise AssertionError(f"the prefix and its holders were not found: {found}")


async def _timed_client(url: str, chunk_ids: Sequence[bytes]) -> list[float]:
    client = LookupClient(url, timeout_s=10)
    await client.open()
    seconds = []
    for _ in range(NUM_TIMED):
        began = time.perf_counter()
        answer = await client.lookup(chunk_ids)
        seconds.append(time.perf_counter() - began)
        if answer.num_prefix != NUM_ASKED:
            raise AssertionError("the prefix was not found")
    await client.close()
    return seconds


def _windows(asked: _Question, port: int) -> list[float]:
    """Return the answers a second that all callers get together, in each window."""
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    callers = []
    for _ in range(NUM_CALLERS):
        mine, theirs = context.Pipe()
        caller = context.Process(target=_call, args=(asked.data, port, theirs), daemon=True)
        caller.start()
        ends.append(mine)
        callers.append(caller)
    for end in ends:
        end.recv()
    for end in ends:
        end.send("begin")
    counts = [end.recv() for end in ends]
    for caller in callers:
        caller.join()
    return [sum(window) / WINDOW_S for window in zip(*counts, strict=True)]


def _call(data: bytes, port: int, parent: Connection) -> None:
    """Have a question on its way over every connection; send the parent the number of answers in
    each window.
    """
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS_PER_CALLER)]
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(data)
    expected = {_body(_read_answer(sock)) for sock in socks}
    parent.send("ready")
    parent.recv()
    counts = [0] * NUM_WINDOWS
    began = time.perf_counter()
    for sock in socks:
        sock.sendall(data)
    while True:
        for sock in socks:
            if _body(_read_answer(sock)) not in expected:
                raise AssertionError("an answer differs from the first")
            window = int((time.perf_counter() - began) / WINDOW_S)
            if window >= NUM_WINDOWS:
                parent.send(counts)
                return
            counts[window] += 1
            sock.sendall(data)


def _read_answer(sock: socket.socket) -> bytes:
    """Read one answer, which has a Content-Length."""
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


def _body(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]
