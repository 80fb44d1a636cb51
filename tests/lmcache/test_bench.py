"""The comparison with LMCache, in small: every place, and CacheGen. What comes back is compared by
the engines' own processes, which end where a byte differs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench import peers

NUM_TOKENS = 512
NAMES = ("memory", "paged", "sidecar", "disk", "lm", "redis")
CALLS = {
    "memory": ["store", "retrieve", "lookup of 2 chunks, first after 0.1 s"],
    "sidecar": [
        "store, first pass of a client",
        "retrieve, first pass of a client",
        "store",
        "retrieve",
    ],
    "disk": ["store", "retrieve, warm", "retrieve, cold", "lookup of 2 chunks"],
}


def at_once(name: str, work: Callable[[], Any]) -> Any:
    return work()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SETTLE_S", 0.0)
    monkeypatch.setattr(peers, "REST_S", 0.1)
    # Threads that wait for each other take minutes on a busy machine.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_both_engines_bring_back_what_they_stored(name: str, tmp_path: Path) -> None:
    rows = peers.at_place(name, at_once, tmp_path, NUM_TOKENS, rounds=1)
    if name in CALLS:
        assert [row.name.partition(": ")[2] for row in rows] == CALLS[name]
    assert all(row.peer and row.ours > 0 for row in rows)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["chunks", "codec"])
def test_rows_that_are_not_of_a_place(name: str, tmp_path: Path) -> None:
    rows = peers.PARTS[name](at_once, tmp_path, 1)
    assert len(rows) == 2
    assert all(row.peer and row.ours > 0 for row in rows)
