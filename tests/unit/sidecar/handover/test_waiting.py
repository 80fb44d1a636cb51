"""The queue of a drain: what is taken out and not dealt with comes back, in its order."""

from __future__ import annotations

import random

import pytest
from lmcache_sidecar.handover.handover import MAX_BATCH_BYTES, WaitingChunks
from lmcache_sidecar.handover.takers import MAX_BATCH_CHUNKS

from tests.suites.chunks import make_key

KEYS = [make_key(i) for i in range(40)]


def queue(num_chunks: int = len(KEYS), num_bytes: int = 10) -> WaitingChunks:
    return WaitingChunks([(key, num_bytes) for key in KEYS[:num_chunks]])


def test_the_hottest_are_given_out_first_and_those_not_settled_come_back() -> None:
    waiting = queue()
    with waiting.batch("a") as batch:
        assert batch.keys == KEYS[:MAX_BATCH_CHUNKS]
        batch.settle(KEYS[1])
    assert len(waiting) == len(KEYS) - 1
    with waiting.batch("a") as batch:
        assert batch.keys == [KEYS[0], *KEYS[2 : MAX_BATCH_CHUNKS + 1]]


def test_two_takers_do_not_get_the_same_chunk() -> None:
    waiting = queue(20)
    with waiting.batch("a") as first, waiting.batch("b") as second:
        assert set(first.keys).isdisjoint(second.keys)
        assert len(first.keys) + len(second.keys) == 20
        assert len(waiting) == 0
    assert len(waiting) == 20


def test_a_failure_loses_nothing() -> None:
    waiting = queue(5)

    def fail() -> None:
        with waiting.batch("a") as batch:
            batch.settle(KEYS[0])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with waiting.batch("a") as batch:
        assert batch.keys == KEYS[1:5]


def test_what_a_taker_refused_it_is_not_offered_again_and_others_are() -> None:
    waiting = queue(3)
    with waiting.batch("a") as batch:
        batch.refused.add(KEYS[0])
    assert waiting.num_refused == 1
    with waiting.batch("a") as batch:
        assert batch.keys == KEYS[1:3]
    with waiting.batch("b") as batch:
        assert batch.keys == KEYS[:3]
        for key in KEYS[:3]:
            batch.settle(key)
    assert (len(waiting), waiting.num_refused) == (0, 0)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(MAX_BATCH_BYTES * 2, 1), (MAX_BATCH_BYTES // 2, 2), (MAX_BATCH_BYTES // 2 + 1, 1)],
)
def test_batches_are_bounded_in_bytes_but_never_empty(num_bytes: int, expected: int) -> None:
    with queue(5, num_bytes).batch("a") as batch:
        assert len(batch.keys) == expected


@pytest.mark.parametrize("seed", range(20))
def test_whatever_takers_do_every_chunk_is_settled_once_or_waits(seed: int) -> None:
    rng = random.Random(seed)
    waiting = queue()
    settled = []
    for _ in range(60):
        with waiting.batch(rng.choice("abc")) as batch:
            for key in list(batch.keys):
                what = rng.choice(("settle", "refuse", "leave"))
                if what == "settle":
                    batch.settle(key)
                    settled.append(key)
                elif what == "refuse":
                    batch.refused.add(key)
    assert len(settled) == len(set(settled))
    assert len(waiting) == len(KEYS) - len(settled)
