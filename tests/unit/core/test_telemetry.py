from __future__ import annotations

import threading

import pytest
from lmcache_core import telemetry
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, STORED_CHUNKS_TOTAL, Counters


def test_a_counter_begins_at_zero_and_grows():
    counters = Counters()
    assert counters.value(STORED_CHUNKS_TOTAL) == 0
    counters.add(STORED_CHUNKS_TOTAL)
    counters.add(STORED_CHUNKS_TOTAL, 4)
    counters.add(STORED_CHUNKS_TOTAL, 0)
    assert counters.value(STORED_CHUNKS_TOTAL) == 5
    assert counters.value(MISSED_CHUNKS_TOTAL) == 0


def test_labels_are_counted_apart_and_together():
    counters = Counters()
    counters.add(MISSED_CHUNKS_TOTAL, 2, "absent")
    counters.add(MISSED_CHUNKS_TOTAL, 3, "damaged")
    counters.add(MISSED_CHUNKS_TOTAL)
    assert counters.value(MISSED_CHUNKS_TOTAL, "absent") == 2
    assert counters.value(MISSED_CHUNKS_TOTAL, "") == 1
    assert counters.value(MISSED_CHUNKS_TOTAL, "never seen") == 0
    assert counters.value(MISSED_CHUNKS_TOTAL) == 6


def test_asking_leaves_no_trace():
    counters = Counters()
    counters.value(STORED_CHUNKS_TOTAL, "tier")
    counters.value(STORED_CHUNKS_TOTAL)
    assert counters.snapshot() == {}


def test_a_snapshot_is_a_copy():
    counters = Counters()
    counters.add(STORED_CHUNKS_TOTAL, 1, "memory")
    snapshot = counters.snapshot()
    counters.add(STORED_CHUNKS_TOTAL, 1, "memory")
    assert snapshot == {(STORED_CHUNKS_TOTAL, "memory"): 1}


def test_a_counter_never_falls():
    with pytest.raises(AssertionError, match="cannot decrease"):
        Counters().add(STORED_CHUNKS_TOTAL, -1)


def test_threads_lose_nothing():
    counters = Counters()

    def count():
        for _ in range(2000):
            counters.add(STORED_CHUNKS_TOTAL, 1, "memory")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.value(STORED_CHUNKS_TOTAL) == 16000


def test_names_say_what_they_count():
    names = [value for name, value in vars(telemetry).items() if name.endswith("_TOTAL")]
    assert len(names) == len(set(names)) > 5
    assert all(name.startswith("lmcache_") and name.endswith("_total") for name in names)
