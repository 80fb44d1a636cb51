"""The lookups that a sidecar remembers."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_core.record import Staged, StagedFrom
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.telemetry import Counters
from lmcache_sidecar import recent_lookups
from lmcache_sidecar.recent_lookups import RecentLookup, RecentLookups, count_prefix

from tests.fixtures.chains import TAKEN_BYTES, Shelf, chain_of, keys_of_rank, names_of, store_chunks
from tests.fixtures.embedded import PATIENCE_S, until
from tests.fixtures.frames import HELLO
from tests.fixtures.sidecar import RunningSocket, running_socket

CHAIN = chain_of(range(4))


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def sidecar(tmp_path: Path, shelf: Shelf) -> Iterator[RunningSocket]:
    with running_socket(tmp_path, 64 * TAKEN_BYTES, lower=[shelf]) as running:
        yield running


@pytest.fixture
def store(sidecar: RunningSocket) -> Iterator[SidecarChunkStore]:
    client = SidecarChunkStore(sidecar.path, HELLO, PATIENCE_S, Counters())
    client.open(lambda salt: None)
    yield client
    client.close()


HAVE_ALL = Staged(True, (b"\1\1\1\1",))


def recent(sidecar: RunningSocket) -> RecentLookups:
    return sidecar.server.context.lookups


def latest(sidecar: RunningSocket, text: str) -> RecentLookup:
    found = recent(sidecar).latest(text)
    assert found is not None, text
    return found


def test_last_answer_to_a_request_is_remembered(
    sidecar: RunningSocket, store: SidecarChunkStore, shelf: Shelf
) -> None:
    store_chunks(store, keys_of_rank(CHAIN, 0)[:1])
    shelf.held.update(names_of(keys_of_rank(CHAIN, 0)[1:2]))
    store.stage("0a1b:chatcmpl-7-ff", [CHAIN])
    until(
        lambda: store.stage("0a1b:chatcmpl-7-ff", [CHAIN]) == Staged(True, (b"\1\2\0\0",)),
        "not read",
    )
    found = latest(sidecar, "chatcmpl-7")
    assert found.found == {StagedFrom.HOT: 1, StagedFrom.DISK: 1}
    assert (found.num_chunks, found.is_final, found.missing) == (4, True, "never_stored")
    assert found.chunk_hashes == [key.chunk_hash for key in keys_of_rank(CHAIN, 0)]
    assert recent(sidecar).latest("chatcmpl-8") is None


def test_what_came_while_a_request_waited_is_remembered(
    sidecar: RunningSocket, store: SidecarChunkStore
) -> None:
    store_chunks(store, keys_of_rank(CHAIN, 0)[:1])
    store.stage("a", [CHAIN], source="pod-7")
    store_chunks(store, keys_of_rank(CHAIN, 0)[1:])
    until(lambda: store.stage("a", [CHAIN], source="pod-7") == HAVE_ALL, "not found")
    found = latest(sidecar, "a")
    assert (found.source, found.num_at_once, found.found.total()) == ("pod-7", 1, 4)
    assert found.settled_s is not None
    store.stage("b", [CHAIN])
    assert (latest(sidecar, "b").source, latest(sidecar, "b").num_at_once) == (None, 4)


def test_reason_is_that_of_the_first_missing_chunk(
    sidecar: RunningSocket, store: SidecarChunkStore
) -> None:
    store_chunks(store, keys_of_rank(CHAIN, 0))
    store.stage("whole", [CHAIN])
    store.unstage(["whole"])
    store.stage("flushed", [])  # so that the sidecar has heard of it
    sidecar.hot.evict_bytes(64 * TAKEN_BYTES)
    store.stage("gone", [CHAIN])
    found = [latest(sidecar, name) for name in ("gone", "whole")]
    assert [(one.found.total(), one.missing) for one in found] == [(0, "evicted"), (4, "")]


def test_a_lookup_is_forgotten_after_an_hour(
    sidecar: RunningSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_800_000_000.0
    for name, age_s in (("request-old", 3601), ("request-recent", 3599)):
        monkeypatch.setattr(time, "time", lambda age_s=age_s: now - age_s)
        recent(sidecar).note(name, [CHAIN], Staged(True, (b"\0\0\0\0",)))
    monkeypatch.setattr(time, "time", lambda: now)
    assert latest(sidecar, "request").request_id == "request-recent"
    assert recent(sidecar).latest("request-old") is None


def test_numbers_of_kept_lookups_and_of_their_hashes_are_bounded(
    sidecar: RunningSocket, store: SidecarChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_lookups, "MAX_LOOKUPS", 3)
    monkeypatch.setattr(recent_lookups, "MAX_CHUNKS", 2)
    for number in range(5):
        store.stage(f"request-{number}", [CHAIN])
    found = latest(sidecar, "request")
    assert (found.request_id, len(found.chunk_hashes)) == ("request-4", 2)
    kept = [recent(sidecar).latest(f"request-{number}") is not None for number in range(5)]
    assert kept == [False, False, True, True, True]


@pytest.mark.parametrize("num_groups", [0, 1, 3])
def test_each_chunk_of_the_prefix_counts_once_at_its_farthest_tier(num_groups: int) -> None:
    dice = random.Random(num_groups)
    for _ in range(100):
        origins = [
            bytes(dice.choices(range(6), (1, 9, 9, 9, 9, 9), k=20)) for _ in range(num_groups)
        ]
        prefix = itertools.takewhile(all, zip(*origins, strict=True))
        want = Counter(StagedFrom(max(chunk)) for chunk in prefix)
        assert count_prefix(origins) == want
