"""Comparison with LMCache: the ratios of its rows, and failure on a wrong byte."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bench import peer_child, peer_places, peers
from tests.bench.peer_child import KV, Shape

TINY = {"num_tokens": 64, "chunk_size": 32, "num_layers": 2, "num_heads": 1, "head_size": 8}


def scripted(**seconds: float) -> Any:
    """An engine whose calls take these seconds."""
    return SimpleNamespace(call=lambda what, turn: seconds[what])


def test_ratios_above_one_say_that_ours_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SETTLE_S", 0.0)
    monkeypatch.setattr(peers, "REST_S", 0.0)
    engines = {
        "ours": scripted(store=1.0, retrieve=0.5, lookup=0.001),
        "peer": scripted(store=2.0, retrieve=1.0, lookup=0.002),
    }
    names: list[Any] = [("ours", "Hot", {}), ("lmcache", "Hot", {}), "a limit"]
    options: dict[str, Any] = {"shape": Shape(num_tokens=4096), "delay": 0, "lookup": "lookup"}
    place = peer_places.Place("a place", *names, lambda: 0.5, lambda: 0.25, **options)
    taken = peers.Reading(place, rounds=3)
    taken.take(contextmanager(lambda: iter([engines])))
    rate = 0.536870912  # GB/s: 512 MiB in a second
    store, load, lookup = (row.cells() for row in taken.rows(cores=0.25))
    assert store[2:6] == (f"{rate / 2:.2f}", f"{rate:.2f}", "", f"{2 * rate:.2f}")
    assert load[2:6] == (f"{rate:.2f}", f"{2 * rate:.2f}", "", f"{4 * rate:.2f}")
    assert store[6:8] == load[6:8] == ("0.50", "2.00")
    assert lookup[1:] == ("ms", "2.00", "1.00", "", "", "", "2.00", "0.2", "")


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
