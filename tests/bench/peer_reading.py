"""Rounds of `peers` at one place, both engines and the limits in turn, and rows of the table."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.bench.codec_neighbours import other_load
from tests.bench.measure import GB
from tests.bench.peer_engines import Child, children
from tests.bench.peer_places import PLACES, Place

NUM_LOOKUPS = 20
NUM_RESTS, REST_S = 5, 3.0
SETTLE_S = 0.5
"""Wait before each call, in which an engine may finish its background work."""
FIRST_ROUNDS = 3
"""Of a client that is measured from its start: an arena of two prompts and a half is new to it."""
Run = Callable[[str, Callable[[], Any]], Any]


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: What was done.
        unit: GB/s, or of a time.
        peer: LMCache's figure, unless the name says otherwise; None: there is none.
        ours: Our figure.
        limit: What the machine does, or what a plain engine takes.
        without_digests: Ours, if it computes no digests, as the peer's does.
        note: What the limit is.
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
        """For the table. A ratio above 1 says that ours is faster."""
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
    "limit",
    "ours against limit",
    "ours against peer",
    "other cores",
    "the limit",
)


class Reading:
    """Times of the two engines and the limits at one place.

    Args:
        place: Where.
        rounds: How many count.
    """

    def __init__(self, place: Place, rounds: int) -> None:
        self.place = place
        self.seconds: dict[str, dict[str, list[float]]] = {
            kind: defaultdict(list) for kind in (*place.engines, "limit")
        }
        self._rounds = -(-rounds // place.num_clients)

    def take(self, started: Callable[[], AbstractContextManager[dict[str, Child]]]) -> None:
        """Measure in turn, in a different order each round; the first rounds do not count."""
        turn = 0
        for _ in range(self.place.num_clients):
            with started() as engines:
                turn = self._take_rounds(engines, turn)
                if self.place.make_cold is not None:
                    self._take_cold(engines)
                self._take_lookups(engines, turn - 1)

    def _take_rounds(self, engines: dict[str, Child], first: int) -> int:
        delay = self.place.delay
        num_warm_up = 1 + delay if self.place.num_clients == 1 else FIRST_ROUNDS
        for i in range(num_warm_up + self._rounds):
            is_first = i == 0 and self.place.num_clients > 1
            for kind in self._kinds(i):
                stored = self._once(engines, kind, "store", first + i, is_first)
                loaded = (
                    self._once(engines, kind, "retrieve", first + i - delay) if i >= delay else 0
                )
                if i >= num_warm_up or is_first:
                    prefix = "first " if is_first else ""
                    self.seconds[kind][f"{prefix}store"].append(stored)
                    self.seconds[kind][f"{prefix}retrieve"].append(loaded)
        return first + num_warm_up + self._rounds

    def _take_cold(self, engines: dict[str, Child]) -> None:
        assert self.place.make_cold is not None
        for turn in range(1 + self._rounds):
            for kind in self._kinds(turn):
                self.place.make_cold()
                seconds = self._once(engines, kind, "retrieve", turn)
                self.seconds[kind]["cold"] += [seconds] if turn else []

    def _take_lookups(self, engines: dict[str, Child], turn: int) -> None:
        is_rested = self.place.lookup == "first lookup"
        for i in range((NUM_RESTS if is_rested else NUM_LOOKUPS) if self.place.lookup else 0):
            time.sleep(REST_S if is_rested else 0.0)
            for kind in self._kinds(i):
                if kind in {"ours", "peer"}:
                    seconds = engines[kind].ask("lookup", turn)
                    self.seconds[kind][self.place.lookup].append(seconds)

    def _kinds(self, turn: int) -> list[str]:
        kinds = list(self.seconds)
        first = turn % len(kinds)
        return kinds[first:] + kinds[:first]

    def _once(
        self,
        engines: dict[str, Child],
        kind: str,
        what: str,
        turn: int,
        is_first: bool = False,
    ) -> float:
        time.sleep(SETTLE_S)
        if self.place.is_backed and what == "store":
            use_memory(3 * self.place.shape.num_bytes)
        if kind == "limit":
            place = self.place
            if is_first and place.first_store_limit is not None:
                return place.first_store_limit[1]()
            return place.store_limit() if what == "store" else place.retrieve_limit()
        return engines[kind].ask(what, turn)

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
        engines = {kind: (*arguments, place.shape) for kind, arguments in place.engines.items()}
        folder = directory / f"logs-{name}"
        folder.mkdir()
        run(place.name, lambda: reading.take(partial(children, engines, folder)))
    return list(reading.rows(cores))


def use_memory(num_bytes: int) -> None:
    """Use free memory of the machine once, and free it."""
    torch.ones(num_bytes, dtype=torch.uint8)
