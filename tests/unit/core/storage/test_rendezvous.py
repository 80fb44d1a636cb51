"""Rendezvous hashing: the same everywhere, fair, and moving no more than it must."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import xxhash
from lmcache_core.storage.remote.rendezvous import home, ranked, score
from lmcache_core.testing.chunks import make_key

GOLDEN = Path(__file__).parents[3] / "contract" / "golden" / "rendezvous.json"
VECTORS: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
IDS = [make_key(i).key.chunk_id() for i in range(4000)]


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["chunk_id"])
def test_golden_vectors(case: dict[str, Any]) -> None:
    chunk_id = bytes.fromhex(case["chunk_id"])
    for name, expected in case["scores"].items():
        assert f"{score(name, chunk_id):016x}" == expected
        assert xxhash.xxh3_64_hexdigest(name.encode() + b"\0" + chunk_id) == expected
    assert ranked(reversed(case["ranked"]), chunk_id) == case["ranked"]
    assert home(sorted(case["ranked"]), chunk_id) == case["ranked"][0]


def test_chunks_are_spread_evenly() -> None:
    counts = Counter(home([f"s-{i}" for i in range(4)], chunk_id) for chunk_id in IDS)
    assert all(850 < count < 1150 for count in counts.values()), counts


def test_a_server_that_comes_takes_only_what_it_wins() -> None:
    before, after = ["s-0", "s-1", "s-2"], ["s-0", "s-1", "s-2", "s-3"]
    moved = [chunk_id for chunk_id in IDS if home(before, chunk_id) != home(after, chunk_id)]
    assert all(home(after, chunk_id) == "s-3" for chunk_id in moved)
    assert 850 < len(moved) < 1150


def test_a_server_that_goes_leaves_its_chunks_to_their_second_choice() -> None:
    names = ["s-0", "s-1", "s-2", "s-3"]
    for chunk_id in IDS:
        first, second, *_ = ranked(names, chunk_id)
        left = [name for name in names if name != "s-2"]
        assert home(left, chunk_id) == (second if first == "s-2" else first)
