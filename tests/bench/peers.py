"""`make bench-peers`: measure our engine, LMCache's and the machine's limits in turn.

The same code (`peer_child.py`) drives both through their public calls, in separate processes and
environments, with default settings, except that ours waits for a slow tier instead of declining it;
ours checks every digest. A store is timed until the tier has the whole prompt. Every byte that
comes back is compared.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcache_demo.processes import Processes
from lmcache_demo.settings import quiet_environment

from tests.bench.limits import copy_work, redis_limits, socket_limit
from tests.bench.measure import GB
from tests.bench.peer_child import PROMPTS_AT_ONCE, SMALL
from tests.bench.report import Section
from tests.bench.shape import CHUNK_BYTES, TOTAL_BYTES
from tests.fixtures.redis_server import running_redis

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("peer_child.py")
LMCACHE_PYTHON = ROOT / ".lmcache" / "venv" / "bin" / "python"
ROUNDS = 5
NUM_LOOKUPS = 20
NUM_SMALL_CHUNKS = PROMPTS_AT_ONCE * SMALL["NUM_TOKENS"] // SMALL["CHUNK_SIZE"]
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 300.0
LOAD_SECONDS = 2.0
SETTLE_S = 0.5
"""Wait before each call, in which an engine may finish its background work."""


class PeerMissingError(Exception):
    """LMCache has not been installed."""


class Child:
    """One engine in its own process.

    Args:
        kind: `ours` or `lmcache`.
        tier: The tier at which a store ends, by its name in `lookup`.
        options: Options of its configuration.
        log: File for its output.
        arguments: Further arguments of the process.
    """

    def __init__(
        self, kind: str, tier: str, options: dict[str, Any], log: Path, *arguments: str
    ) -> None:
        environment = _environment()
        if kind == "ours":
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        python = LMCACHE_PYTHON if kind == "lmcache" else sys.executable
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(python), str(CHILD), kind, tier, json.dumps(options), *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )

    def wait_ready(self) -> None:
        """Wait until it has started."""
        self._read(START_TIMEOUT_S)

    def ask(self, what: str, turn: int) -> float:
        """Return the seconds that a call took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "turn": turn}).encode() + b"\n")
        self._process.stdin.flush()
        return float(self._read(ANSWER_TIMEOUT_S)["seconds"])

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], timeout_s)
        line = stdout.readline() if readable else b""
        if not line:
            tail = self._log.read_text(errors="replace")[-3000:]
            what = "has ended" if readable else "gives no answer in time"
            raise RuntimeError(f"{self._log.stem} {what}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Place:
    """Where KV is kept, for both engines.

    Attributes:
        name: For people.
        tier: Name of the tier in `lookup`.
        ours: Options of our engine.
        lmcache: Options of LMCache's.
        limit: Description of the limits.
        store_limit: Moves the same bytes there as fast as the machine can; returns the seconds.
        retrieve_limit: Moves them back, likewise.
        delay: Rounds between storing and retrieving a prompt: one for slower tiers, when memory no
            longer holds it.
    """

    name: str
    tier: str
    ours: dict[str, Any]
    lmcache: dict[str, Any]
    limit: str
    store_limit: Callable[[], float]
    retrieve_limit: Callable[[], float]
    delay: int = 1


@dataclass
class Times:
    """Seconds of each round."""

    store: list[float] = field(default_factory=list)
    retrieve: list[float] = field(default_factory=list)
    lookup: list[float] = field(default_factory=list)


@contextmanager
def _hot() -> Iterator[Place]:
    copy = copy_work()
    memory = {"max_local_cpu_size": 1.25}
    yield Place(
        "memory",
        "Hot",
        memory | {"remote_url": None},
        memory | {"local_cpu": True},
        "copy, one thread",
        _timed(lambda: copy(0)),
        _timed(lambda: copy(0)),
        delay=0,
    )


_SMALL_MEMORY = {"max_local_cpu_size": 0.6}
"""Slightly more than one prompt: a prompt retrieved a round later has been evicted."""


@contextmanager
def _disk(directory: Path) -> Iterator[Place]:
    data = memoryview(bytearray(secrets.token_bytes(1 << 20) * (TOTAL_BYTES >> 20)))
    target = memoryview(bytearray(TOTAL_BYTES))
    file = directory / "raw"

    def write() -> None:
        with file.open("wb", buffering=0) as raw:
            for at in range(0, TOTAL_BYTES, CHUNK_BYTES):
                raw.write(data[at : at + CHUNK_BYTES])

    def read() -> None:
        with file.open("rb", buffering=0) as raw:
            for at in range(0, TOTAL_BYTES, CHUNK_BYTES):
                raw.readinto(target[at : at + CHUNK_BYTES])

    def options(name: str) -> dict[str, Any]:
        folder = directory / name
        folder.mkdir()
        return {"local_disk": f"file://{folder}/", "max_local_disk_size": 6.0}

    yield Place(
        "disk, page cache",
        "LocalDiskBackend",
        _SMALL_MEMORY | {"remote_url": None} | options("ours"),
        _SMALL_MEMORY | {"local_cpu": False} | options("lmcache"),
        "raw write, raw read",
        _timed(write),
        _timed(read),
    )


@contextmanager
def _lm(directory: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(directory, quiet_environment()))
        # Room for all rounds, like LMCache's server, which has no bound.
        settings = {"port": 0, "lm_port": 0, "memory_gb": 4.0, "instance_id": "bench"}
        _, ports = processes.start_service("cache_storage", "lmcache_storage", settings)
        port = _free_port()
        with (directory / "lmcache-server.log").open("wb") as log:
            server = subprocess.Popen(
                [str(LMCACHE_PYTHON), "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"],
                env=_environment(),
                stdout=log,
                stderr=log,
            )
        stack.callback(server.wait)
        stack.callback(server.kill)
        _await_port(port)
        yield Place(
            "lm://, each its own server",
            "RemoteBackend",
            _SMALL_MEMORY | {"remote_url": f"lm://127.0.0.1:{ports['lm_port']}"},
            _SMALL_MEMORY | {"local_cpu": False, "remote_url": f"lm://127.0.0.1:{port}"},
            "socket, recv_into",
            _socket_move,
            _socket_move,
        )


@contextmanager
def _redis() -> Iterator[Place]:
    with running_redis("--maxmemory", "9gb") as server:
        store, retrieve = redis_limits(server.port)
        url = {"remote_url": server.url}
        yield Place(
            "Redis",
            "RemoteBackend",
            _SMALL_MEMORY | url,
            _SMALL_MEMORY | url | {"local_cpu": False, "remote_serde": "naive"},
            "raw SET, raw GET, recv_into",
            _timed(store),
            _timed(retrieve),
        )


def small_chunks(directory: Path, rounds: int = ROUNDS) -> Section:
    """Measure what a chunk of 1 KiB in memory costs both engines, in turn."""
    with ExitStack() as stack:
        children = {}
        for kind in ("lmcache", "ours"):
            log = directory / f"small-{kind}.log"
            own = {"remote_url": None} if kind == "ours" else {"local_cpu": True}
            options = {"max_local_cpu_size": 1.25} | own
            children[kind] = Child(kind, "Hot", options, log, "--small")
            stack.callback(children[kind].kill)
        for child in children.values():
            child.wait_ready()
        rows = []
        for what in ("stores", "retrieves"):
            seconds: dict[str, list[float]] = {kind: [] for kind in children}
            for turn in range(1 + rounds):
                for kind, child in children.items():
                    taken = child.ask(what, turn)
                    seconds[kind] += [taken] if turn else []  # the first round does not count
            peer, ours = (statistics.median(of_kind) for of_kind in seconds.values())
            per_chunk = (f"{each / NUM_SMALL_CHUNKS * 1e6:.1f}" for each in (peer, ours))
            rows.append((what[:-1], *per_chunk, f"{ours / peer:.2f}", ""))
    return Section(
        f"In turn with LMCache {_version()}: a chunk of 1 KiB in memory, µs",
        ("call", "LMCache", "ours", "ours / LMCache", ""),
        rows,
    )


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return run


def _socket_move() -> float:
    return socket_limit(rounds=1).seconds[0]


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LMCACHE_", "PYTHONPATH"))
    }
    own = {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return kept | own


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _await_port(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


class Reading:
    """Times of the two engines and the limits at one place.

    Args:
        place: Where.
        rounds: How many count.
    """

    def __init__(self, place: Place, rounds: int) -> None:
        self.place = place
        self.times = {kind: Times() for kind in ("ours", "lmcache", "limit")}
        self._rounds = rounds

    def take(self, children: dict[str, Child]) -> None:
        """Measure in turn, in a different order each round; the first rounds do not count."""
        kinds = ["ours", "lmcache", "limit"]
        num_warm_up = 1 + self.place.delay
        for turn in range(num_warm_up + self._rounds):
            for kind in kinds:
                time.sleep(SETTLE_S)
                stored = self._once(children, kind, "store", turn)
                time.sleep(SETTLE_S)
                at = turn - self.place.delay
                retrieved = self._once(children, kind, "retrieve", at) if at >= 0 else 0.0
                if turn >= num_warm_up:
                    self.times[kind].store.append(stored)
                    self.times[kind].retrieve.append(retrieved)
            kinds = kinds[1:] + kinds[:1]
        for _ in range(NUM_LOOKUPS):
            for kind, child in children.items():
                self.times[kind].lookup.append(child.ask("lookup", turn))

    def _once(self, children: dict[str, Child], kind: str, what: str, turn: int) -> float:
        if kind == "limit":
            place = self.place
            return place.store_limit() if what == "store" else place.retrieve_limit()
        return children[kind].ask(what, turn)

    def row(self) -> tuple[str, ...]:
        """Return the cells of this place in the table."""
        cells = [self.place.name]
        for what in ("store", "retrieve"):
            peer, ours, limit = (
                TOTAL_BYTES / statistics.median(getattr(self.times[kind], what)) / GB
                for kind in ("lmcache", "ours", "limit")
            )
            cells += [f"{peer:.2f}", f"{ours:.2f}", f"{ours / peer:.2f}", f"{ours / limit:.2f}"]
        for kind in ("lmcache", "ours"):
            cells.append(f"{statistics.median(self.times[kind].lookup) * 1e3:.2f}")
        return (*cells, self.place.limit)


HEADINGS = (
    "place",
    "LMCache: store",
    "ours: store",
    "ours / LMCache",
    "ours / limit",
    "LMCache: retrieve",
    "ours: retrieve",
    "ours / LMCache",
    "ours / limit",
    "LMCache: lookup, ms",
    "ours: lookup, ms",
    "limit",
)
PLACES = ("memory", "disk", "lm", "redis")


def measure(
    run: Callable[[str, Callable[[], Any]], Any],
    directory: Path,
    places: tuple[str, ...] = PLACES,
    rounds: int = ROUNDS,
) -> tuple[Section, str]:
    """Measure all places.

    Args:
        run: Shows the name of a part while it runs.
        directory: For disks and logs.
        places: Of `PLACES`.
        rounds: How many count.

    Returns:
        The table, and a sentence about other load on the machine.

    Raises:
        PeerMissingError: LMCache is not installed.
    """
    if not LMCACHE_PYTHON.exists():
        raise PeerMissingError(f"no LMCache at {LMCACHE_PYTHON}: run 'make bench-peers'")
    opened = {
        "memory": _hot,
        "disk": lambda: _disk(directory),
        "lm": lambda: _lm(directory),
        "redis": _redis,
    }
    rows, loads = [], []
    for name in places:
        loads.append(other_load())
        with ExitStack() as stack:
            place = stack.enter_context(opened[name]())
            children = {}
            for kind, options in (("ours", place.ours), ("lmcache", place.lmcache)):
                tier = "LocalCPUBackend" if (kind, name) == ("lmcache", "memory") else place.tier
                children[kind] = Child(kind, tier, options, directory / f"{name}-{kind}.log")
                stack.callback(children[kind].kill)
            for child in children.values():
                child.wait_ready()
            reading = Reading(place, rounds)
            run(f"LMCache and ours: {place.name}", lambda: reading.take(children))  # noqa: B023 (run at once)
            rows.append(reading.row())
    section = Section(f"In turn with LMCache {_version()}: 512 MiB, GB/s", HEADINGS, rows)
    remark = (
        f"Medians of {rounds} rounds, in turn; every byte compared; default settings, so ours"
        " checks every digest, except that it waits for a slow tier instead of declining it."
        f" Other processes used {min(loads):.1f} to {max(loads):.1f} of"
        f" {os.cpu_count()} cores."
    )
    return section, remark


def other_load() -> float:
    """Return how many cores were busy for a moment while this process waited."""

    def busy_and_all() -> tuple[int, int]:
        fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(fields) - fields[3] - fields[4], sum(fields)

    busy, total = busy_and_all()
    time.sleep(LOAD_SECONDS)
    busy_now, total_now = busy_and_all()
    return (os.cpu_count() or 1) * (busy_now - busy) / max(1, total_now - total)


def _version() -> str:
    asked = "import importlib.metadata as m; print(m.version('lmcache'))"
    done = subprocess.run([LMCACHE_PYTHON, "-c", asked], capture_output=True, text=True, check=True)
    return done.stdout.strip()
