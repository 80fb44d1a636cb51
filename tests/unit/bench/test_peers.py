"""Comparison with LMCache: the order of calls, the ratios, and failure on a wrong byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench import peer_child, peers


class ScriptedChild:
    """An engine whose calls take given seconds; notes what it is asked."""

    def __init__(self, kind: str, seconds: dict[str, float], asked: list[tuple[str, str, int]]):
        self._kind = kind
        self._seconds = seconds
        self._asked = asked

    def ask(self, what: str, turn: int) -> float:
        self._asked.append((self._kind, what, turn))
        return self._seconds[what]


def place(delay: int) -> peers.Place:
    limits: list[Callable[[], float]] = [lambda: 0.5, lambda: 0.25]
    return peers.Place("a place", "Hot", {}, {}, "a limit", *limits, delay=delay)


def reading(
    monkeypatch: pytest.MonkeyPatch, delay: int, rounds: int
) -> tuple[peers.Reading, list[tuple[str, str, int]]]:
    monkeypatch.setattr(peers, "SETTLE_S", 0.0)
    asked: list[tuple[str, str, int]] = []
    children: Any = {
        "ours": ScriptedChild("ours", {"store": 1.0, "retrieve": 0.5, "lookup": 0.001}, asked),
        "lmcache": ScriptedChild("lmcache", {"store": 2.0, "retrieve": 1, "lookup": 0.002}, asked),
    }
    taken = peers.Reading(place(delay), rounds)
    taken.take(children)
    return taken, asked


def test_ratios_are_of_the_medians_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, _ = reading(monkeypatch, delay=0, rounds=3)
    rate = 0.536870912  # GB/s: 512 MiB in a second
    row = taken.row()
    assert row[:5] == ("a place", f"{rate / 2:.2f}", f"{rate:.2f}", "2.00", "0.50")
    assert row[5:9] == (f"{rate:.2f}", f"{2 * rate:.2f}", "2.00", "0.50")
    assert row[9:] == ("2.00", "1.00", "a limit")
    assert len(row) == len(peers.HEADINGS)


def test_slower_tiers_are_asked_for_what_memory_has_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, asked = reading(monkeypatch, delay=1, rounds=2)
    of_ours = [(what, turn) for kind, what, turn in asked if kind == "ours" and what != "lookup"]
    assert of_ours == [
        ("store", 0), ("store", 1), ("retrieve", 0), ("store", 2), ("retrieve", 1), ("store", 3),
        ("retrieve", 2),
    ]  # fmt: skip
    assert [len(times.retrieve) for times in taken.times.values()] == [2, 2, 2]


def test_the_order_changes_with_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = reading(monkeypatch, delay=0, rounds=2)
    assert [kind for kind, what, _ in asked if what == "store"] == [
        "ours", "lmcache", "lmcache", "ours", "ours", "lmcache",
    ]  # fmt: skip


class FaultyEngine:
    """Keeps one prompt; gives it back with a bit turned, or not all of it."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._kv = torch.zeros(0)

    def store(self, tokens: torch.Tensor, kv: torch.Tensor) -> None:
        self._kv = kv.clone()

    def lookup(self, tokens: torch.Tensor, search_range: list[str]) -> int:
        return len(tokens)

    def retrieve(self, tokens: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        kv.copy_(self._kv)
        if self._fault == "bit":
            kv.view(torch.int16)[1, 1, 7, 3] ^= 1
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[-1] = self._fault != "short"
        return mask


@pytest.mark.parametrize(
    ("fault", "message"), [("", None), ("bit", "other bytes"), ("short", "7 of 8 tokens")]
)
def test_every_byte_is_compared(
    monkeypatch: pytest.MonkeyPatch, fault: str, message: str | None
) -> None:
    for name, value in {"NUM_TOKENS": 8, "NUM_LAYERS": 2, "HIDDEN": 16}.items():
        monkeypatch.setattr(peer_child, name, value)
    driver = peer_child.Driver(FaultyEngine(fault), lambda kv: {"kv": kv}, "Hot")
    assert driver.store(0)["seconds"] >= 0
    if message is None:
        assert driver.retrieve(0)["seconds"] >= 0
    else:
        with pytest.raises(ValueError, match=message):
            driver.retrieve(0)


def test_the_prompt_of_another_round_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_TOKENS": 8, "NUM_LAYERS": 2, "HIDDEN": 16}.items():
        monkeypatch.setattr(peer_child, name, value)
    driver = peer_child.Driver(FaultyEngine(""), lambda kv: {"kv": kv}, "Hot")
    driver.store(0)
    driver.store(1)
    with pytest.raises(ValueError, match="other bytes"):
        driver.retrieve(0)


def test_without_lmcache_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "LMCACHE_PYTHON", tmp_path / "python")
    with pytest.raises(peers.PeerMissingError, match="make bench-peers"):
        peers.measure(lambda name, work: pytest.fail(f"{name} has begun"), tmp_path)
