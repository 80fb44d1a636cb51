"""Comparison with LMCache: the order of calls, the ratios, and failure on a wrong byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench import peer_child, peer_places, peers
from tests.bench.peer_child import KV, Shape
from tests.bench.peers import Row

SHAPE = Shape(num_tokens=4096)
TINY = {"num_tokens": 64, "chunk_size": 32, "num_layers": 2, "num_heads": 1, "head_size": 8}
Asked = list[tuple[str, str, int]]


class ScriptedEngine:
    """An engine whose calls take given seconds; notes what it is asked."""

    def __init__(self, kind: str, seconds: dict[str, float], asked: Asked) -> None:
        self._kind = kind
        self._seconds = seconds
        self._asked = asked

    def call(self, what: str, turn: int) -> float:
        self._asked.append((self._kind, what, turn))
        return self._seconds[what]


@pytest.fixture(autouse=True)
def _without_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SETTLE_S", 0.0)
    monkeypatch.setattr(peers, "REST_S", 0.0)


def reading(rounds: int, **fields: Any) -> tuple[peers.Reading, Asked]:
    """Measure scripted engines at a place of these fields."""
    asked: Asked = []
    engines = {
        "ours": ScriptedEngine("ours", {"store": 1.0, "retrieve": 0.5, "lookup": 0.001}, asked),
        "peer": ScriptedEngine("peer", {"store": 2.0, "retrieve": 1.0, "lookup": 0.002}, asked),
        "without_digests": ScriptedEngine("bare", {"store": 0.8, "retrieve": 0.4}, asked),
    }

    @contextmanager
    def started() -> Iterator[Any]:
        asked.append(("both", "start", 0))
        yield engines

    limits: list[Callable[[], float]] = [lambda: 0.5, lambda: 0.25]
    names: list[Any] = [("ours", "Hot", {}), ("lmcache", "Hot", {})]
    place = peer_places.Place("a place", *names, "a limit", *limits, **{"shape": SHAPE} | fields)
    taken = peers.Reading(place, rounds)
    taken.take(started)
    return taken, asked


def calls(asked: Asked, kind: str) -> list[tuple[str, int]]:
    return [(what, turn) for who, what, turn in asked if who == kind and what != "lookup"]


def test_ratios_above_one_say_that_ours_is_faster() -> None:
    taken, _ = reading(rounds=3, delay=0, lookup="lookup")
    rate = 0.536870912  # GB/s: 512 MiB in a second
    store, load, lookup = (row.cells() for row in taken.rows(cores=0.25))
    assert store[2:6] == (f"{rate / 2:.2f}", f"{rate:.2f}", "", f"{2 * rate:.2f}")
    assert load[2:6] == (f"{rate:.2f}", f"{2 * rate:.2f}", "", f"{4 * rate:.2f}")
    assert store[6:8] == load[6:8] == ("0.50", "2.00")
    assert lookup[1:] == ("ms", "2.00", "1.00", "", "", "", "2.00", "0.2", "")
    without_a_peer = Row("vLLM", "ms", None, 30.0, 20.0, note="plain vLLM").cells()
    figures = ("ms", "", "30.00", "", "20.00", "0.67", "", "0.0")
    assert without_a_peer == ("vLLM", *figures, "plain vLLM")


def test_ours_without_digests_is_measured_in_turn_and_not_asked_for_lookups() -> None:
    bare = {"verify_hot": "never"}
    taken, asked = reading(rounds=2, delay=0, lookup="lookup", without_digests=bare)
    assert taken.place.engines["without_digests"] == ("ours", "Hot", bare)
    assert [len(times["store"]) for times in taken.seconds.values()] == [2] * 4
    assert ("bare", "lookup", 2) not in asked
    store, *_ = (row.cells() for row in taken.rows(cores=0.0))
    assert store[3:5] == ("0.54", "0.67")


def test_slower_tiers_are_asked_for_what_memory_has_evicted() -> None:
    _, asked = reading(rounds=2, delay=1)
    turns = [(what, turn) for turn in range(1, 4) for what in ("store", "retrieve")]
    assert calls(asked, "ours") == [
        ("store", 0),
        *((what, turn - (what == "retrieve")) for what, turn in turns),
    ]


def test_the_order_changes_with_each_round() -> None:
    _, asked = reading(rounds=2, delay=0)
    order = [kind for kind, what, _ in asked if what == "store"]
    assert order == ["ours", "peer", "peer", "ours", "ours", "peer"]


def test_each_client_is_measured_from_its_first_call() -> None:
    first = ("another limit", lambda: 0.125)
    taken, asked = reading(rounds=4, delay=0, num_clients=2, first_store_limit=first)
    assert [what for who, what, _ in asked if who == "both"] == ["start"] * 2
    turns = [turn for what, turn in calls(asked, "ours") if what == "store"]
    assert turns == list(range(10)), "a prompt was stored twice"
    assert taken.seconds["limit"]["first store"] == [0.125] * 2
    assert taken.seconds["limit"]["store"] == [0.5] * 4
    assert [(row.name.removeprefix("a place: "), row.note) for row in taken.rows(cores=0.0)] == [
        ("store, first pass of a client", "another limit"),
        ("retrieve, first pass of a client", "a limit"),
        ("store", "a limit"),
        ("retrieve", "a limit"),
    ]


def test_cold_reads_follow_an_emptied_page_cache() -> None:
    emptied: list[str] = []
    taken, asked = reading(rounds=2, make_cold=lambda: emptied.append("once"))
    assert calls(asked, "ours")[-3:] == [("retrieve", 0), ("retrieve", 1), ("retrieve", 2)]
    assert len(emptied) == 3 * 3
    names = [row.name for row in taken.rows(0.0)]
    assert names[1:] == ["a place: retrieve, warm", "a place: retrieve, cold"]


def test_memory_is_used_before_stores_where_it_is_to_be_backed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[int] = []
    monkeypatch.setattr(peers, "use_memory", used.append)
    reading(rounds=1, is_backed=False)
    assert not used
    reading(rounds=1, is_backed=True)
    assert used == [3 * SHAPE.num_bytes] * 9  # two rounds do not count


class FaultyEngine:
    """Keeps one prompt; gives it back with a bit turned, or not all of it."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._layers: list[torch.Tensor] = []

    def store(self, tokens: torch.Tensor, kv: KV) -> None:
        self._layers = [layer.clone() for layer in kv.layers()]

    def lookup(self, tokens: torch.Tensor, search_range: list[str]) -> int:
        return len(tokens)

    def retrieve(self, tokens: torch.Tensor, kv: KV) -> torch.Tensor:
        if self._fault == "bit":
            self._layers[1].view(-1)[-1] ^= 1
        for i, layer in enumerate(self._layers):
            if kv.tensor.dim() == 4:
                kv.tensor.view(torch.int16)[:, i] = layer
            else:
                kv.tensor.view(torch.int16)[i][:, kv.blocks] = layer
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[-1] = self._fault != "short"
        return mask


def driver(fault: str, is_paged: bool) -> peer_child.Driver:
    shape = Shape(is_paged=is_paged, **TINY)
    return peer_child.Driver(FaultyEngine(fault), lambda kv: {"kv": kv}, "Hot", shape)


@pytest.mark.parametrize("is_paged", [False, True])
def test_every_byte_is_compared(is_paged: bool) -> None:
    sound = driver("", is_paged)
    sound.store(0)
    assert sound.retrieve(0) >= 0
    for fault, message in (("bit", "other bytes"), ("short", "63 of 64 tokens")):
        driven = driver(fault, is_paged)
        driven.store(0)
        with pytest.raises(ValueError, match=message):
            driven.retrieve(0)
    sound.store(1)
    with pytest.raises(ValueError, match="other bytes"):
        sound.retrieve(0)  # the engine has the prompt of another round


def test_pages_lie_in_another_order_where_they_are_loaded() -> None:
    stored, loaded = (KV(Shape(is_paged=True, **TINY), seed) for seed in (1, 0))
    assert stored.blocks != loaded.blocks
    assert sorted(stored.blocks) == sorted(loaded.blocks)


@pytest.mark.parametrize("is_paged", [False, True])
def test_our_engine_is_driven_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_paged: bool
) -> None:
    monkeypatch.setattr(peers, "NUM_RESTS", 0)
    with peer_places.memory(tmp_path, num_tokens=512, is_paged=is_paged) as where:
        of = dict.fromkeys(where.engines, (*where.ours, where.shape))
        taken = peers.Reading(where, rounds=1)
        taken.take(partial(peers.engines, of, tmp_path))
    assert [len(taken.seconds[kind]["retrieve"]) for kind in where.engines] == [1, 1, 1]


def test_without_lmcache_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "LMCACHE_PYTHON", tmp_path / "python")
    with pytest.raises(peers.PeerMissingError, match="make bench-peers"):
        peers.measure(lambda name, work: pytest.fail(f"{name} has begun"), tmp_path)
