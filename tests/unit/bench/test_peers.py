"""Comparison with LMCache: the order of calls, the ratios, and failure on a wrong byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench import peer_child, peer_places, peer_reading, peers
from tests.bench.peer_child import KV, Shape
from tests.bench.peer_engines import children
from tests.bench.peer_reading import HEADINGS, Row

SHAPE = Shape(num_tokens=4096)
TINY = {"num_tokens": 64, "chunk_size": 32, "num_layers": 2, "num_heads": 1, "head_size": 8}


class ScriptedChild:
    """An engine whose calls take given seconds; notes what it is asked."""

    def __init__(self, kind: str, seconds: dict[str, float], asked: list[tuple[str, str, int]]):
        self._kind = kind
        self._seconds = seconds
        self._asked = asked

    def ask(self, what: str, turn: int) -> float:
        self._asked.append((self._kind, what, turn))
        return self._seconds[what]


def place(**fields: Any) -> peer_places.Place:
    limits: list[Callable[[], float]] = [lambda: 0.5, lambda: 0.25]
    engines = (("ours", "Hot", {}), ("lmcache", "Hot", {}))
    values = {"shape": SHAPE} | fields
    return peer_places.Place("a place", *engines, "a limit", *limits, **values)


def reading(
    monkeypatch: pytest.MonkeyPatch, rounds: int, **fields: Any
) -> tuple[peer_reading.Reading, list[tuple[str, str, int]]]:
    monkeypatch.setattr(peer_reading, "SETTLE_S", 0.0)
    monkeypatch.setattr(peer_reading, "REST_S", 0.0)
    asked: list[tuple[str, str, int]] = []
    engines: Any = {
        "ours": ScriptedChild("ours", {"store": 1.0, "retrieve": 0.5, "lookup": 0.001}, asked),
        "peer": ScriptedChild("peer", {"store": 2.0, "retrieve": 1.0, "lookup": 0.002}, asked),
        "without_digests": ScriptedChild("bare", {"store": 0.8, "retrieve": 0.4}, asked),
    }

    @contextmanager
    def started() -> Iterator[Any]:
        asked.append(("both", "start", 0))
        yield engines

    taken = peer_reading.Reading(place(**fields), rounds)
    taken.take(started)
    return taken, asked


def calls(asked: list[tuple[str, str, int]], kind: str) -> list[tuple[str, int]]:
    return [(what, turn) for who, what, turn in asked if who == kind and what != "lookup"]


def test_ratios_above_one_say_that_ours_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, _ = reading(monkeypatch, rounds=3, delay=0, lookup="lookup")
    rate = 0.536870912  # GB/s: 512 MiB in a second
    store, load, lookup = (row.cells() for row in taken.rows(cores=0.25))
    assert store[2:6] == (f"{rate / 2:.2f}", f"{rate:.2f}", "", f"{2 * rate:.2f}")
    assert load[2:6] == (f"{rate:.2f}", f"{2 * rate:.2f}", "", f"{4 * rate:.2f}")
    assert store[6:8] == load[6:8] == ("0.50", "2.00")
    assert lookup[1:] == ("ms", "2.00", "1.00", "", "", "", "2.00", "0.2", "")
    assert store[8:] == ("0.2", "a limit")
    assert len(store) == len(HEADINGS)


def test_a_row_without_a_peer_is_held_against_its_limit() -> None:
    cells = Row("vLLM", "ms", None, 30.0, 20.0, note="plain vLLM").cells()
    assert cells == ("vLLM", "ms", "", "30.00", "", "20.00", "0.67", "", "0.0", "plain vLLM")


def test_ours_without_digests_is_measured_in_turn_and_not_asked_for_lookups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = {"verify_hot": "never"}
    taken, asked = reading(monkeypatch, rounds=2, delay=0, lookup="lookup", without_digests=bare)
    assert taken.place.engines["without_digests"] == ("ours", "Hot", bare)
    assert [len(times["store"]) for times in taken.seconds.values()] == [2] * 4
    assert ("bare", "lookup", 2) not in asked
    store, *_ = (row.cells() for row in taken.rows(cores=0.0))
    assert store[3:5] == ("0.54", "0.67")


def test_slower_tiers_are_asked_for_what_memory_has_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, asked = reading(monkeypatch, rounds=2, delay=1)
    assert calls(asked, "ours") == [
        ("store", 0), ("store", 1), ("retrieve", 0), ("store", 2), ("retrieve", 1), ("store", 3),
        ("retrieve", 2),
    ]  # fmt: skip
    assert [len(times["retrieve"]) for times in taken.seconds.values()] == [2, 2, 2]


def test_the_order_changes_with_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = reading(monkeypatch, rounds=2, delay=0)
    assert [kind for kind, what, _ in asked if what == "store"] == [
        "ours", "peer", "peer", "ours", "ours", "peer",
    ]  # fmt: skip


def test_each_client_is_measured_from_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ("another limit", lambda: 0.125)
    taken, asked = reading(monkeypatch, rounds=4, delay=0, num_clients=2, first_store_limit=first)
    assert [what for who, what, _ in asked if who == "both"] == ["start"] * 2
    turns = [turn for what, turn in calls(asked, "ours") if what == "store"]
    assert turns == list(range(10)), "a prompt was stored twice"
    assert {call: len(times) for call, times in taken.seconds["ours"].items()} == {
        "first store": 2, "first retrieve": 2, "store": 4, "retrieve": 4,
    }  # fmt: skip
    assert taken.seconds["limit"]["first store"] == [0.125] * 2
    assert taken.seconds["limit"]["store"] == [0.5] * 4
    rows = list(taken.rows(cores=0.0))
    assert [row.note for row in rows] == ["another limit", *["a limit"] * 3]
    assert [row.name for row in rows] == [
        "a place: store, first pass of a client", "a place: retrieve, first pass of a client",
        "a place: store", "a place: retrieve",
    ]  # fmt: skip


def test_cold_reads_follow_an_emptied_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    taken, asked = reading(monkeypatch, rounds=2, make_cold=lambda: emptied.append("once"))
    assert calls(asked, "ours")[-3:] == [("retrieve", 0), ("retrieve", 1), ("retrieve", 2)]
    assert len(emptied) == 3 * 3
    assert [len(times["cold"]) for times in taken.seconds.values()] == [2, 2, 2]
    assert [row.name for row in taken.rows(0.0)][1:] == [
        "a place: retrieve, warm", "a place: retrieve, cold",
    ]  # fmt: skip


def test_memory_is_used_before_stores_where_it_is_to_be_backed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[int] = []
    monkeypatch.setattr(peer_reading, "use_memory", used.append)
    reading(monkeypatch, rounds=1, is_backed=False)
    assert not used
    reading(monkeypatch, rounds=1, is_backed=True)
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
@pytest.mark.parametrize(
    ("fault", "message"), [("", None), ("bit", "other bytes"), ("short", "63 of 64 tokens")]
)
def test_every_byte_is_compared(fault: str, message: str | None, is_paged: bool) -> None:
    driven = driver(fault, is_paged)
    assert driven.store(0)["seconds"] >= 0
    if message is None:
        assert driven.retrieve(0)["seconds"] >= 0
    else:
        with pytest.raises(ValueError, match=message):
            driven.retrieve(0)


@pytest.mark.parametrize("is_paged", [False, True])
def test_the_prompt_of_another_round_is_noticed(is_paged: bool) -> None:
    driven = driver("", is_paged)
    driven.store(0)
    driven.store(1)
    with pytest.raises(ValueError, match="other bytes"):
        driven.retrieve(0)


def test_pages_lie_in_another_order_where_they_are_loaded() -> None:
    stored, loaded = (KV(Shape(is_paged=True, **TINY), seed) for seed in (1, 0))
    assert stored.blocks != loaded.blocks
    assert sorted(stored.blocks) == sorted(loaded.blocks)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_paged", [False, True])
def test_our_engine_is_driven_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_paged: bool
) -> None:
    monkeypatch.setattr(peer_reading, "SETTLE_S", 0.0)
    monkeypatch.setattr(peer_reading, "NUM_RESTS", 0)
    with peer_places.memory(tmp_path, num_tokens=512, is_paged=is_paged) as where:
        engines = dict.fromkeys(where.engines, (*where.ours, where.shape))
        taken = peer_reading.Reading(where, rounds=1)
        taken.take(partial(children, engines, tmp_path))
    assert {kind: len(taken.seconds[kind]["retrieve"]) for kind in where.engines} == {
        "ours": 1, "peer": 1, "without_digests": 1,
    }  # fmt: skip


def test_without_lmcache_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "LMCACHE_PYTHON", tmp_path / "python")
    with pytest.raises(peers.PeerMissingError, match="make bench-peers"):
        peers.measure(lambda name, work: pytest.fail(f"{name} has begun"), tmp_path)
