"""Counters, figures of codecs, and log lines that others could cause at will."""

from __future__ import annotations

import logging
import math

import pytest
from lmcache_core import telemetry
from lmcache_core.telemetry import (
    CODEC_DECODED_BYTES_TOTAL,
    CODEC_ENCODE_MICROSECONDS_TOTAL,
    CODEC_ENCODED_BYTES_TOTAL,
    CODEC_ENCODED_RAW_BYTES_TOTAL,
    MISSED_CHUNKS_TOTAL,
    STORED_CHUNKS_TOTAL,
    CodecFigures,
    Counters,
    MeasuredError,
)
from lmcache_core.telemetry.codec_figures import MAX_ERROR, MAX_PROFILES
from lmcache_core.telemetry.counters import MAX_OBSERVED
from lmcache_core.telemetry.sparse_log import SparseLog


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


def test_names_of_counters_have_prefix_and_unit():
    names = [value for name, value in vars(telemetry).items() if name.endswith("_TOTAL")]
    assert len(names) == len(set(names)) > 5
    assert all(name.startswith("lmcache_") and name.endswith("_total") for name in names)


def test_tier_and_process_count_the_same() -> None:
    counters = Counters()
    counters.add(STORED_CHUNKS_TOTAL)
    whole = CodecFigures(counters)
    first, second = CodecFigures(whole=whole), CodecFigures(whole=whole)
    first.encoded("cachegen", 1000, 250, 0.5)
    second.encoded("lossless", 100, 80, 0.25)
    second.left_raw("lossless", 0.25)
    second.decoded("cachegen", 1000, 250, 0.125)
    assert counters.value(CODEC_ENCODED_RAW_BYTES_TOTAL, "cachegen") == 1000
    assert counters.value(CODEC_ENCODED_BYTES_TOTAL) == 330
    assert counters.value(CODEC_ENCODE_MICROSECONDS_TOTAL, "lossless") == 500_000
    assert counters.value(CODEC_DECODED_BYTES_TOTAL, "cachegen") == 250
    assert first.stats() == {
        "encoded_chunks": 1,
        "encoded_raw_bytes": 1000,
        "encoded_bytes": 250,
        "encode_microseconds": 500_000,
    }
    assert whole.stats()["encoded_chunks"] == 2
    assert whole.stats()["unencoded_chunks"] == 1
    assert "stored_chunks" not in whole.stats()


def test_last_and_worst_errors_are_kept_by_profile() -> None:
    whole = CodecFigures()
    tier = CodecFigures(whole=whole)
    for error in (MeasuredError(0.1, 0.05), MeasuredError(0.3, 0.01), MeasuredError(0.2, 0.02)):
        tier.measured("cachegen/low", error)
    tier.measured("cachegen/high", MeasuredError(0.01, 0.001))
    assert whole.errors() == tier.errors()
    assert whole.errors()["cachegen/low"] == (MeasuredError(0.2, 0.02), MeasuredError(0.3, 0.05))
    assert tier.stats() == {"worst_max_error_ppm": 300_000, "worst_rms_error_ppm": 50_000}


@pytest.mark.parametrize(
    ("stated", "kept"), [(math.inf, MAX_ERROR), (math.nan, MAX_ERROR), (-1.0, 0.0)]
)
def test_error_in_a_record_is_bounded(stated: float, kept: float) -> None:
    figures = CodecFigures()
    figures.measured("p", MeasuredError(stated, stated))
    assert figures.errors()["p"][0] == MeasuredError(kept, kept)
    assert figures.stats()["worst_max_error_ppm"] == kept * 1e6


def test_the_number_of_profiles_is_bounded() -> None:
    figures = CodecFigures()
    for i in range(MAX_PROFILES + 5):
        figures.measured(f"p{i}", MeasuredError(0.1, 0.1))
    figures.measured("p0", MeasuredError(0.5, 0.5))
    assert len(figures.errors()) == MAX_PROFILES
    assert figures.errors()["p0"][0].max_relative == 0.5


logger = logging.getLogger("lmcache_core.test")


def test_a_kind_of_line_comes_once_in_a_while_and_says_what_was_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    log = SparseLog(logger, 10.0, lambda: now)
    for now in (0.0, 1.0, 9.9, 10.0, 10.1, 30.0, 40.0):
        log.log(logging.INFO, "client %d", int(now))
        log.log(logging.WARNING, "other")
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        "client 0",
        "client 10 (and 2 more since the last such line)",
        "client 30 (and 1 more since the last such line)",
        "client 40",
    ]
    assert len(caplog.records) == 8, "each kind for itself"


def test_measurements_are_kept_until_they_are_taken_the_newest_of_many() -> None:
    counters = Counters()
    for value in range(MAX_OBSERVED + 2):
        counters.observe("a", value)
    counters.observe("b", 0.5)
    taken = counters.take_observed()
    assert (taken["a"][0], len(taken["a"]), taken["b"]) == (2, MAX_OBSERVED, [0.5])
    assert counters.take_observed() == {}
