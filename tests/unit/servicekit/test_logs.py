"""The log level over REST, and lines that quote text from other processes."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator

import pytest
from fastapi import FastAPI
from lmcache_core.errors import ConfigError, LMCacheError, RecordError, UnavailableError, one_line
from lmcache_core.wire.messages import ErrorMessage
from lmcache_servicekit.app import create_service_app
from lmcache_servicekit.logs import TextFormatter, create_log_router

from tests.fixtures.sample_service import SampleSettings, asgi_client, no_parts

OWN = "tests.of_log_levels.inner"


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    names = ("httpx", "httpcore", "asyncio", OWN, "tests.of_log_levels")
    levels = {name: logging.getLogger(name).level for name in names}
    level = root.level
    root.setLevel("INFO")
    yield
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def app(**options: object) -> FastAPI:
    return create_service_app(
        SampleSettings(**options),
        "lmcache-servicekit",
        lifespan=no_parts,
        routers=[create_log_router()],
    )


async def test_level_of_the_process_is_set() -> None:
    async with asgi_client(app()) as client:
        assert (await client.get("/v1/admin/log-level")).json()["level"] == "info"
        answer = (await client.put("/v1/admin/log-level", json={"level": "debug"})).json()
        assert answer["level"] == "debug"
        assert logging.getLogger(OWN).isEnabledFor(logging.DEBUG)
        assert not logging.getLogger("httpx").isEnabledFor(logging.INFO), (
            "libraries that log URLs stay quiet"
        )
        await client.put("/v1/admin/log-level", json={"level": "error"})
        assert not logging.getLogger(OWN).isEnabledFor(logging.WARNING)


async def test_one_logger_has_a_level_of_its_own() -> None:
    logging.getLogger(OWN)
    async with asgi_client(app()) as client:
        wanted = {"level": "debug", "logger": "tests.of_log_levels"}
        answer = (await client.put("/v1/admin/log-level", json=wanted)).json()
        assert (answer["level"], answer["loggers"]["tests.of_log_levels"]) == ("info", "debug")
        assert (await client.get("/v1/admin/log-level")).json() == answer
    assert logging.getLogger(OWN).isEnabledFor(logging.DEBUG), "it holds for what is below it"
    assert not logging.getLogger("lmcache_core").isEnabledFor(logging.DEBUG)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"level": "loud"}, 422),
        ({"level": "debug", "logger": "a b"}, 422),
        ({"level": "debug", "logger": "never.seen.before"}, 404),
    ],
)
async def test_unknown_level_or_logger_is_refused(body: dict[str, object], status: int) -> None:
    async with asgi_client(app()) as client:
        assert (await client.put("/v1/admin/log-level", json=body)).status_code == status
    assert logging.getLogger().level == logging.INFO
    assert "never.seen.before" not in logging.root.manager.loggerDict, "asking makes no logger"


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


def test_surrogate_is_escaped() -> None:
    assert one_line("a\udc80b") == "a\\udc80b"
