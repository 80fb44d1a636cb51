"""This library's log lines go where vLLM's go."""

from __future__ import annotations

import io
import logging

import pytest
from lmcache_core.integrations.vllm.logs import log_as


def logger_of(
    manager: logging.Manager,
    name: str,
    stream: io.StringIO | None = None,
    level: int = logging.NOTSET,
) -> logging.Logger:
    logger = manager.getLogger(name)
    logger.setLevel(level)
    if stream is not None:
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        logger.addHandler(handler)
    return logger


@pytest.fixture
def manager() -> logging.Manager:
    """Loggers apart from those of this process."""
    return logging.Manager(logging.RootLogger(logging.WARNING))


@pytest.mark.parametrize(
    ("level", "seen"), [(logging.INFO, "INFO ours.sidecar connected\n"), (logging.WARNING, "")]
)
def test_lines_go_where_those_of_vllm_go(manager: logging.Manager, level: int, seen: str) -> None:
    stream = io.StringIO()
    theirs, ours = logger_of(manager, "theirs", stream, level), logger_of(manager, "ours")
    for _ in range(2):  # scheduler and worker in one process
        log_as(theirs, ours)
    manager.getLogger("ours.sidecar").info("connected")
    manager.getLogger("ours.sidecar").debug("and so on")
    assert stream.getvalue() == seen


@pytest.mark.parametrize("configured", ["ours", "root"])
def test_own_configuration_of_logs_stays(manager: logging.Manager, configured: str) -> None:
    theirs = logger_of(manager, "theirs", io.StringIO(), logging.INFO)
    ours = logger_of(manager, "ours", io.StringIO() if configured == "ours" else None)
    if configured == "root":
        manager.root.addHandler(logging.StreamHandler(io.StringIO()))
    before = list(ours.handlers)
    log_as(theirs, ours)
    assert (ours.handlers, ours.level) == (before, logging.NOTSET)
