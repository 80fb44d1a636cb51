"""The section `peers` of docs/benchmarks.md (`make bench-peers`): our engine, LMCache's, vLLM's own
tiers where they run on a CPU, and the machine's limits, in turn.

The same code (`peer_child.py`) drives all through their public calls, in processes and environments
of their own, with default settings, except that ours waits for a slow tier instead of declining it.
A store is timed until the tier has the whole prompt. Every byte that comes back is compared.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lmcache_demo.model import MODEL_DIR

from tests.bench import codecs, scale, vllm
from tests.bench.child import Child
from tests.bench.measure import GB, Run, other_load, percentile
from tests.bench.peer_child import PROMPTS_AT_ONCE, SMALL, Shape
from tests.bench.peer_places import (
    LMCACHE_PYTHON,
    PLACES,
    ROOT,
    START_TIMEOUT_S,
    Place,
    peer_environment,
)
from tests.bench.report import Findings, Section
from tests.releases import NEWEST_VLLM

ROUNDS = 5
FULL_MIB = 512
BYTES_A_TOKEN = Shape(1).num_bytes
QUIET_CORES = 0.2
NUM_LOOKUPS = 20
NUM_RESTS, REST_S = 5, 3.0
SETTLE_S = 0.5
"""Wait before each call, in which an engine may finish its background work."""
FIRST_ROUNDS = 3
"""Of a client that is measured from its start: an arena of two prompts and a half is new to it."""
NUM_PROCESSES = 16
CODEC_CALLS = 10
VLLM_SIZES = (*vllm.SHORT_TOKENS, vllm.NUM_TOKENS)
VLLM_ROUNDS = 2
"""Rounds of vLLM to one of the others."""
LONG_ROUNDS = 0, 1
"""Of four rounds, those with the longest prompt: one in each order of the engines. What the first
one is asked again finds the processor's caches filled by the other.
"""


class PeerMissingError(Exception):
    """LMCache or vLLM has not been installed."""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        unit: GB/s, or of a time.
        peer: LMCache's figure, unless the name says otherwise; None: there is none.
        limit: The reference: what the machine does, or what a plain engine takes.
        without_digests: Ours, if it computes no digests, as the peer does.
        note: What the reference is.
        cores: Cores that other processes used just before.
    """

    name: str
    unit: str
    peer: float | None
    ours: float
    limit: float | None = None
    without_digests: float | None = None
    note: str = ""
    cores: float = 0.0

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table. A ratio above 1 says that ours is faster."""
        digits = 1 if self.unit == "µs" else 2 if self.unit != "GB/s of a core" else 3

        def text(figure: float | None) -> str:
            return "" if figure is None else f"{figure:,.{digits}f}"

        def ratio(other: float | None) -> str:
            if other is None:
                return ""
            is_rate = self.unit.startswith("GB/s")
            return f"{self.ours / other if is_rate else other / self.ours:.2f}"

        figures = (text(each) for each in (self.peer, self.ours, self.without_digests, self.limit))
        ratios = (ratio(self.limit), ratio(self.peer))
        return (self.name, self.unit, *figures, *ratios, f"{self.cores:.1f}", self.note)


HEADINGS = (
    "what",
    "unit",
    "peer",
    "ours",
    "without digests",
    "reference",
    "ours against reference",
    "ours against peer",
    "other cores",
    "the reference",
)


class PeerEngine(Child):
    """One engine in its own process and environment.

    Args:
        kind: As `peer_child` knows it.
        tier: The tier at which a store ends, by its name in `lookup`.
        options: Of its configuration.
        log: File for its output.
    """

    def __init__(
        self, kind: str, tier: str, options: dict[str, Any], shape: Shape, log: Path
    ) -> None:
        environment, python = peer_environment(), sys.executable
        if kind.startswith("ours"):
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        elif kind.startswith("vllm"):
            environment |= vllm.vllm_environment()
            python = str(vllm.PYTHON)
        else:
            environment["PYTHONPATH"] = str(ROOT)
            python = str(LMCACHE_PYTHON)
        command = [python, "-m", "tests.bench.peer_child", kind, tier, json.dumps(options)]
        super().__init__([*command, shape.as_json()], environment, log)

    def call(self, what: str, turn: int) -> Any:
        """Return what a call answers: mostly the seconds that it took."""
        return self.ask(f"{what} {turn}")


@contextmanager
def engines(of: Mapping[str, tuple[Any, ...]], directory: Path) -> Iterator[dict[str, PeerEngine]]:
    """Run engines, by the name given to each with the arguments of its `PeerEngine`."""
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(PeerEngine(*arguments, directory / f"{name}.log"))
            for name, arguments in of.items()
        }
        for engine in started.values():
            engine.answer(START_TIMEOUT_S)
        yield started


def measure(
    run: Run, directory: Path, parts: Sequence[str] = (), mib: int = FULL_MIB, rounds: int = ROUNDS
) -> Findings:
    """Measure everything; takes twenty minutes. Only a whole table of `FULL_MIB` is written.

    Args:
        directory: For disks and logs.
        parts: Of `ROWS`; none: all.
        mib: Of a prompt.
        rounds: How many count.

    Raises:
        PeerMissingError: LMCache or vLLM is not installed.
    """
    for python in (LMCACHE_PYTHON, vllm.PYTHON):
        if not python.exists():
            raise PeerMissingError(f"there is no {python}: run 'make bench-peers'")
    rows: list[Row] = []
    for name in parts or ROWS:
        if name in PLACES:
            rows += at_place(name, run, directory, mib * 2**20 // BYTES_A_TOKEN, rounds)
        else:
            rows += PARTS[name](run, directory, rounds)
    title = f"In turn with LMCache {_lmcache_version()} and vLLM {NEWEST_VLLM}: {mib} MiB"
    section = Section(title, HEADINGS, [row.cells() for row in rows])
    is_whole = not parts and mib == FULL_MIB
    return Findings([section], [_remark(rows, rounds, directory)], is_whole=is_whole)


def _remark(rows: Sequence[Row], rounds: int, directory: Path) -> str:
    least, most = (each(row.cores for row in rows) for each in (min, max))
    noise = f" Above {QUIET_CORES} the machine is not quiet." if most > QUIET_CORES else ""
    return (
        f"Medians of {rounds} rounds, in turn; every byte compared. A ratio above 1 says that ours"
        " is faster. Default settings, so ours checks every digest, except that it waits for a slow"
        f" tier instead of declining it. Other processes used {least:.1f} to {most:.1f} of"
        f" {os.cpu_count()} cores.{noise} {_not_measured(directory)}"
    )


def _not_measured(directory: Path) -> str:
    """Say in a sentence what of vLLM does not run here, in its words."""
    tier = {"type": "fs", "root_dir": str(directory / "vllm-files")}
    with engines({"refusing": ("vllm-fs", "", {"tier": tier}, Shape(256))}, directory) as started:
        refusal = started["refusing"].call("refusal", 0)
    if not refusal:
        return "vLLM's copies between KV blocks and host memory run here, and are not measured."
    return f'vLLM\'s copies between KV blocks and host memory are not measured: "{refusal}".'


def _lmcache_version() -> str:
    asked = "import importlib.metadata as m; print(m.version('lmcache'))"
    done = subprocess.run([LMCACHE_PYTHON, "-c", asked], capture_output=True, text=True, check=True)
    return done.stdout.strip()


# --- Rows of bytes at a place ---------------------------------------------------------------------


class Reading:
    """Times of the engines and the limits at one place.

    Args:
        rounds: How many count.

    Attributes:
        seconds: By kind ("ours", "peer", "without_digests", "limit") and call.
    """

    def __init__(self, place: Place, rounds: int) -> None:
        self.place = place
        self.seconds: dict[str, dict[str, list[float]]] = {
            kind: defaultdict(list) for kind in (*place.engines, "limit")
        }
        self._rounds = -(-rounds // place.num_clients)

    def take(self, started: Callable[[], AbstractContextManager[Mapping[str, Any]]]) -> None:
        """Measure in turn, in a different order each round; the first rounds do not count."""
        turn = 0
        for _ in range(self.place.num_clients):
            with started() as running:
                turn = self._take_rounds(running, turn)
                if self.place.make_cold is not None:
                    self._take_cold(running)
                self._take_lookups(running, turn - 1)

    def _take_rounds(self, running: Mapping[str, Any], first: int) -> int:
        delay = self.place.delay
        num_warm_up = 1 + delay if self.place.num_clients == 1 else FIRST_ROUNDS
        for i in range(num_warm_up + self._rounds):
            is_first = i == 0 and self.place.num_clients > 1
            for kind in self._kinds(i):
                stored = self._once(running, kind, "store", first + i, is_first)
                loaded = (
                    self._once(running, kind, "retrieve", first + i - delay) if i >= delay else 0
                )
                if i >= num_warm_up or is_first:
                    prefix = "first " if is_first else ""
                    self.seconds[kind][f"{prefix}store"].append(stored)
                    self.seconds[kind][f"{prefix}retrieve"].append(loaded)
        return first + num_warm_up + self._rounds

    def _take_cold(self, running: Mapping[str, Any]) -> None:
        assert self.place.make_cold is not None
        for turn in range(1 + self._rounds):
            for kind in self._kinds(turn):
                self.place.make_cold()
                seconds = self._once(running, kind, "retrieve", turn)
                self.seconds[kind]["cold"] += [seconds] if turn else []

    def _take_lookups(self, running: Mapping[str, Any], turn: int) -> None:
        is_rested = self.place.lookup == "first lookup"
        for i in range((NUM_RESTS if is_rested else NUM_LOOKUPS) if self.place.lookup else 0):
            time.sleep(REST_S if is_rested else 0.0)
            for kind in self._kinds(i):
                if kind in {"ours", "peer"}:
                    seconds = running[kind].call("lookup", turn)
                    self.seconds[kind][self.place.lookup].append(seconds)

    def _kinds(self, turn: int) -> list[str]:
        kinds = list(self.seconds)
        first = turn % len(kinds)
        return kinds[first:] + kinds[:first]

    def _once(
        self, running: Mapping[str, Any], kind: str, what: str, turn: int, is_first: bool = False
    ) -> float:
        time.sleep(SETTLE_S)
        place = self.place
        if place.use_memory is not None and what == "store":
            place.use_memory()
        if kind != "limit":
            return float(running[kind].call(what, turn))
        if is_first and place.first_store_limit is not None:
            return place.first_store_limit[1]()
        return place.store_limit() if what == "store" else place.retrieve_limit()

    def rows(self, cores: float) -> Iterator[Row]:
        """Yield the rows of this place."""
        place = self.place
        calls = {
            "first store": "store, first pass of a client",
            "first retrieve": "retrieve, first pass of a client",
            "store": "store",
            "retrieve": "retrieve" if place.make_cold is None else "retrieve, warm",
            "cold": "retrieve, cold",
        }
        for call, label in calls.items():
            if call in self.seconds["ours"]:
                rates = {
                    kind: place.shape.num_bytes / statistics.median(seconds[call]) / GB
                    for kind, seconds in self.seconds.items()
                }
                note = place.limit
                if call == "first store" and place.first_store_limit is not None:
                    note = place.first_store_limit[0]
                yield Row(f"{place.name}: {label}", "GB/s", **rates, note=note, cores=cores)
        if place.lookup:
            peer, ours = (
                statistics.median(self.seconds[kind][place.lookup]) * 1e3
                for kind in ("peer", "ours")
            )
            after = f", first after {REST_S:g} s" if place.lookup == "first lookup" else ""
            num_chunks = place.shape.num_tokens // place.shape.chunk_size
            name = f"{place.name}: lookup of {num_chunks} chunks{after}"
            yield Row(name, "ms", peer, ours, cores=cores)


def at_place(name: str, run: Run, directory: Path, num_tokens: int, rounds: int) -> list[Row]:
    """Measure one of `PLACES`."""
    cores = other_load()
    with PLACES[name](directory, num_tokens) as place:
        reading = Reading(place, rounds)
        of = {kind: (*arguments, place.shape) for kind, arguments in place.engines.items()}
        folder = directory / f"logs-{name}"
        folder.mkdir()
        run(place.name, lambda: reading.take(partial(engines, of, folder)))
    return list(reading.rows(cores))


# --- Other rows: chunks, short prompts, vLLM, CacheGen --------------------------------------------


def chunks(run: Run, directory: Path, rounds: int) -> list[Row]:
    """What a chunk of 1 KiB in memory costs, in prompts of 16."""
    cores = other_load()
    num_chunks = PROMPTS_AT_ONCE * SMALL.num_tokens // SMALL.chunk_size
    room = {"max_local_cpu_size": 1.25}
    of = {
        "ours": ("ours", "Hot", room | {"remote_url": None}, SMALL),
        "peer": ("lmcache", "LocalCPUBackend", room | {"local_cpu": True}, SMALL),
    }
    calls = ("stores", "retrieves")
    seconds = run("chunks of 1 KiB", lambda: _asked(of, directory, calls, rounds))
    return [
        Row(
            f"fixed cost of a chunk: {call[:-1]}",
            "µs",
            *(each / num_chunks * 1e6 for each in seconds[call]),
            cores=cores,
        )
        for call in calls
    ]


def prompts(run: Run, directory: Path, rounds: int) -> list[Row]:
    """99th percentiles of prompts of one chunk, from many processes at one sidecar."""
    cores = other_load()
    ours, bare = (
        run(name, lambda: scale.prompt_seconds(directory, NUM_PROCESSES, is_bare))  # noqa: B023
        for name, is_bare in (("short prompts", False), ("short prompts, bare", True))
    )
    return [
        Row(
            f"{scale.NUM_TOKENS}-token prompts, sidecar, {NUM_PROCESSES} processes: {call} p99",
            "ms",
            None,
            percentile(ours[call], 99) * 1e3,
            percentile(bare[call], 99) * 1e3,
            note="bare requests and copies",
            cores=cores,
        )
        for call in ("store", "retrieve")
    ]


def first_tokens(run: Run, directory: Path, rounds: int) -> list[Row]:
    """The first token of a real vLLM with our connector, against plain vLLM."""
    cores = other_load()
    model = run("vLLM: model", vllm.made_model)
    took: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    dice = random.Random()  # no prompt may have been seen by an earlier run either

    def measured() -> None:
        with vllm.running_pair(model) as pair:
            for number in range(-1, VLLM_ROUNDS * rounds):
                is_long = number < 0 or number % 4 in LONG_ROUNDS
                sizes = VLLM_SIZES if is_long else VLLM_SIZES[:-1]
                for what, each in vllm.short_round(pair, dice, number, sizes):
                    took[what] += [each.seconds] if number >= 0 else []

    run("vLLM: first tokens", measured)
    shown = {
        "hit by its own prefix cache": (vllm.SHORT_AGAIN, (1025, 4097)),
        "cold prompt, stores on": (vllm.SHORT_COLD, (100, 1000)),
    }
    return [
        Row(
            f"vLLM, {label}, {num_tokens:,} tokens",
            "ms",
            None,
            statistics.median(took[kind, vllm.CONNECTED, num_tokens]) * 1e3,
            statistics.median(took[kind, vllm.PLAIN, num_tokens]) * 1e3,
            note="plain vLLM",
            cores=cores,
        )
        for label, (kind, sizes) in shown.items()
        for num_tokens in sizes
    ]


def codec(run: Run, directory: Path, rounds: int) -> list[Row]:
    """CacheGen on a chunk of the demo's model."""
    cores = other_load()
    chunk = run("CacheGen: a chunk of the demo's model", codecs.chunk_of_the_model)
    file = directory / "chunk.pt"
    torch.save(chunk, file)
    options = {"model": str(MODEL_DIR), "chunk": str(file), "calls": CODEC_CALLS}
    of = {"ours": ("ours-codec", "", options, SMALL), "peer": ("lmcache-codec", "", options, SMALL)}
    calls = ("encode", "decode")
    seconds = run("CacheGen", lambda: _asked(of, directory, calls, rounds))
    return [
        Row(
            f"CacheGen, chunk of {chunk.nbytes / 1e6:.2f} MB: {call}",
            "GB/s of a core",
            *(chunk.nbytes / each / GB for each in seconds[call]),
            cores=cores,
        )
        for call in calls
    ]


def _asked(
    of: Mapping[str, tuple[Any, ...]], directory: Path, calls: Sequence[str], rounds: int
) -> dict[str, tuple[float, float]]:
    """Return the median seconds of each call: the peer's and ours."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    with engines(of, directory) as started:
        for call in calls:
            for turn in range(1 + rounds):  # the first does not count
                for name, engine in list(started.items())[:: 1 if turn % 2 else -1]:
                    taken = engine.call(call, turn)
                    seconds[call, name] += [taken] if turn else []
    return {
        call: (statistics.median(seconds[call, "peer"]), statistics.median(seconds[call, "ours"]))
        for call in calls
    }


PARTS: dict[str, Callable[[Run, Path, int], list[Row]]] = {
    "chunks": chunks,
    "prompts": prompts,
    "vllm": first_tokens,
    "codec": codec,
}
ROWS = (*PLACES, *PARTS)
