"""The lookup service over REST: how soon the longest prefix of 400 chunks is known, and how often a
second, held against bare sockets.

The service runs as in its image: uvloop, httptools, an index in a real Redis on loopback. Callers
are processes of their own that send bytes made beforehand and compare every answer with the first;
they and Redis share the machine's cores with the service.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from lmcache_core.lookup import LookupClient, StoreEvent
from lmcache_core.lookup.messages import (
    JSON,
    MSGPACK,
    ChunksRequest,
    PackedChunksRequest,
    PackedLookupAnswer,
    pack_ids,
)

from tests.bench.codec_neighbours import PROC_STAT, busy_ticks
from tests.bench.lookup_callers import (
    CONNECTIONS_PER_CALLER,
    NUM_CALLERS,
    NUM_WINDOWS,
    Question,
    Rate,
    bare_echo,
    question,
    rate_of,
    read_answer,
)
from tests.bench.report import Section
from tests.fixtures.redis_server import running_redis
from tests.fixtures.service_process import running_service

NUM_CHUNKS = 400
NUM_HOLDERS = 2
NUM_TIMED = 1000
GOAL_MS = 5.0
GOAL_PER_S = 2000
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Cost:
    """Processor time of lookups, which other work on the machine slows less than it slows clocks.

    Attributes:
        service: Process id of the service.
        redis: Process id of Redis.
        ticks: Of the service, of Redis, of callers that have ended, and of all processes: seconds
            so far, then milliseconds of a lookup.
        begin: When it began, `time.perf_counter`.
        others: Cores that other processes kept busy; set at the end.
    """

    service: int
    redis: int
    ticks: tuple[float, ...]
    begin: float
    others: float = 0.0

    @classmethod
    def since(cls, service: int, redis: int) -> Cost:
        """Begin to count."""
        return cls(service, redis, _ticks(service, redis), time.perf_counter())

    def until_now(self, num_lookups: float) -> Cost:
        """What each of so many lookups took."""
        taken = [
            now - before
            for now, before in zip(_ticks(self.service, self.redis), self.ticks, strict=True)
        ]
        others = (taken[3] - sum(taken[:3])) / (time.perf_counter() - self.begin)
        return Cost(
            self.service,
            self.redis,
            tuple(one / num_lookups * 1000 for one in taken),
            self.begin,
            max(others, 0.0),
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """For a table."""
        *spent, _ = self.ticks
        num_cores = os.cpu_count() or 1
        return (
            *(f"{one:.2f}" for one in spent),
            f"{num_cores / sum(spent) * 1000:,.0f}",
            f"{self.others:.1f} of {num_cores}",
        )


def _ticks(service: int, redis: int) -> tuple[float, ...]:
    own = os.times()
    every = busy_ticks(PROC_STAT.read_text()) / os.sysconf("SC_CLK_TCK")
    return (
        _processor_s(service),
        _processor_s(redis),
        own.children_user + own.children_system,
        every,
    )


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    run: Callable[[str, Callable[[], list[Section]]], list[Section]], directory: Path
) -> list[Section]:
    """Latency and rate."""
    return run("lookups over REST", lambda: _measure(directory))


def _measure(directory: Path) -> list[Section]:
    chunk_ids = [os.urandom(16) for _ in range(NUM_CHUNKS)]
    asked = (
        question(
            "MessagePack", MSGPACK, msgspec.msgpack.encode(PackedChunksRequest(pack_ids(chunk_ids)))
        ),
        question(
            "JSON",
            JSON,
            msgspec.json.encode(ChunksRequest([chunk_id.hex() for chunk_id in chunk_ids])),
        ),
    )
    times: list[tuple[str, ...]] = []
    rates: dict[str, Rate] = {}
    costs: dict[str, Cost] = {}
    with running_redis() as redis, redis.client() as plain:
        redis_pid = int(plain.info("server")["process_id"])
        environ = {"PORT": "0", "REDIS_URL": redis.url, "REDIS_TIMEOUT_MS": "2000"}
        with running_service(
            "lmcache_lookup",
            directory,
            {f"LMCACHE_LOOKUP_{name}": value for name, value in environ.items()},
        ) as service:
            asyncio.run(_fill(service.url, chunk_ids))
            port = service.ports["port"]
            answers = {one.name: _check(one, port) for one in asked}
            for one in asked:
                times.append(
                    _time_row(
                        f"400 chunks, {one.name}",
                        _timed(one, port),
                        f"{len(answers[one.name]):,} bytes",
                    )
                )
                cost = Cost.since(service.pid, redis_pid)
                rates[one.name] = rate_of(one, port)
                costs[one.name] = cost.until_now(rates[one.name].num_answers)
            times.append(
                _time_row(
                    "400 chunks, our client",
                    asyncio.run(_timed_client(service.url, chunk_ids)),
                    "with httpx",
                )
            )
        for one in asked:
            with bare_echo(answers[one.name], len(one.data)) as port:
                times.append(
                    _time_row(
                        f"bare echo of the same bytes, {one.name}",
                        _timed(one, port),
                        "uvloop, nothing parsed",
                    )
                )
                rates[f"bare echo, {one.name}"] = rate_of(one, port)
    rows = [
        (name, rate.text, f"{GOAL_PER_S:,}" if "echo" not in name else "", "")
        for name, rate in rates.items()
    ]
    callers = f"{NUM_CALLERS} processes, {NUM_CALLERS * CONNECTIONS_PER_CALLER} connections"
    spent = [(name, *cost.cells, "") for name, cost in costs.items()]
    title = (
        f"Lookups of {NUM_CHUNKS} chunks a second: median (best) of {NUM_WINDOWS} windows;"
        f" {callers}"
    )
    headings = (
        "what",
        "service, ms",
        "Redis, ms",
        "callers, ms",
        "all three can do a second on idle cores",
        "cores busy with other work",
        "",
    )
    return [
        Section(
            "Lookup over REST, Redis on loopback",
            ("what", "ms", "fastest … nine in ten", "goal", "note"),
            times,
        ),
        Section(title, ("what", "a second", "goal", "note"), rows),
        Section("Processor time of a lookup", headings, spent),
    ]


async def _fill(url: str, chunk_ids: Sequence[bytes]) -> None:
    client = LookupClient(url, timeout_s=10)
    await client.open()
    for number in range(NUM_HOLDERS):
        name = f"pod-{number}"
        incarnation = time.time_ns()
        await client.renew_instance(name, incarnation=incarnation, kind="sidecar", ttl_ms=300_000)
        events = [StoreEvent("store", chunk_id, "memory", CHUNK_BYTES) for chunk_id in chunk_ids]
        await client.send_events(name, incarnation=incarnation, first_sequence=0, events=events)
    await client.close()


def _check(one: Question, port: int) -> bytes:
    """The whole answer, after a look at what it says."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(one.data)
        answer = read_answer(sock)
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


def _timed(one: Question, port: int) -> list[float]:
    """Milliseconds of each call, one after the other over one connection."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = []
        for _ in range(NUM_TIMED):
            begin = time.perf_counter()
            sock.sendall(one.data)
            read_answer(sock)
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


def _time_row(name: str, found: Sequence[float], note: str) -> tuple[str, ...]:
    goal = "" if "echo" in name else f"{GOAL_MS:g}"
    nine_in_ten = statistics.quantiles(found, n=10)[-1]
    return (
        name,
        f"{statistics.median(found):.2f}",
        f"{min(found):.2f} … {nine_in_ten:.2f}",
        goal,
        note,
    )
