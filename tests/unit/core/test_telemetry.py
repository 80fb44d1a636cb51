from __future__ import annotations

import threading

import pytest
from lmcache_core import telemetry
from lmcache_core.telemetry import MISSED_CHUNKS_TOTAL, STORED_CHUNKS_TOTAL, Counters


def test_labels_are_counted_separately_and_together():
    counters = Counters()
    counters.add(MISSED_CHUNKS_TOTAL, 2, "absent")
    counters.add(MISSED_CHUNKS_TOTAL, 3, "damaged")
    counters.add(MISSED_CHUNKS_TOTAL)
    assert counters.value(MISSED_CHUNKS_TOTAL, "absent") == 2
    assert counters.value(MISSED_CHUNKS_TOTAL, "") == 1
    assert counters.value(MISSED_CHUNKS_TOTAL) == 6
    assert counters.value(STORED_CHUNKS_TOTAL) == 0


def test_snapshot_is_a_copy_without_counters_that_were_only_read():
    counters = Counters()
    counters.add(STORED_CHUNKS_TOTAL, 1, "memory")
    assert counters.value(MISSED_CHUNKS_TOTAL, "never seen") == 0
    snapshot = counters.snapshot()
    counters.add(STORED_CHUNKS_TOTAL, 1, "memory")
    assert snapshot == {(STORED_CHUNKS_TOTAL, "memory"): 1}


def test_counter_never_falls():
    with pytest.raises(AssertionError, match="cannot decrease"):
        Counters().add(STORED_CHUNKS_TOTAL, -1)


def test_threads_lose_no_count():
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


def test_names_of_counters_have_prefix_and_unit():
    names = [value for name, value in vars(telemetry).items() if name.endswith("_TOTAL")]
    assert len(names) == len(set(names)) > 5
    assert all(name.startswith("lmcache_") and name.endswith("_total") for name in names)
