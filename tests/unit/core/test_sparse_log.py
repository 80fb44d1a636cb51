"""Lines that others could cause at will."""

from __future__ import annotations

import logging

import pytest
from lmcache_core.telemetry.sparse_log import SparseLog

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
