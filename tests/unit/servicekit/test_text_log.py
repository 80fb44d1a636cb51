"""Text from other processes stays within the log line that quotes it."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable

import pytest
from lmcache_core.errors import ConfigError, LMCacheError, RecordError, UnavailableError
from lmcache_core.wire.messages import ErrorMessage
from lmcache_servicekit.logs import TextFormatter

FORGED = "2026-11-29 00:00:00,000 ERROR   lmcache: forged"


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger, stream


@pytest.mark.parametrize("end", ["\n", "\r\n", "\x1b[2K\r", "\x85", "\u2028"])
def test_text_of_others_begins_no_line(log: tuple[logging.Logger, io.StringIO], end: str) -> None:
    logger, stream = log
    logger.warning("pull failed: peer=%s error=%s", f"p{end}{FORGED}", f"e{end}{FORGED}")
    try:
        raise ValueError(f"e{end}{FORGED}")
    except ValueError:
        logger.exception("it failed")
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if line.startswith("2026-11-29 00")] == []
    assert sum(FORGED in line for line in lines) >= 2, "it is shown, within a line"
    assert all(line.isprintable() for line in lines)
    assert not any(line[:1] not in (" ", "2") for line in lines), "a traceback is indented"


@pytest.mark.parametrize("kind", [LMCacheError, UnavailableError, RecordError])
def test_text_of_an_error_is_one_line(kind: Callable[[str], LMCacheError]) -> None:
    error = kind(f"lm://a: busy: \r\n{FORGED}\x1b")
    assert str(error) == f"lm://a: busy: \\r\\n{FORGED}\\x1b"
    assert ErrorMessage.about(error).message == str(error)


def test_text_of_a_wrong_option_may_have_several_lines() -> None:
    assert str(ConfigError("a=1\nb=2")) == "a=1\nb=2"
