from __future__ import annotations

import pytest
from lmcache_storage.compat.dialect import DIALECTS, CloseReason, CompatCommand, CompatRefusedError

from tests.fixtures.compat import (
    ABOUT,
    EXIST,
    GET,
    HEALTH,
    LIST,
    NO_VALUE,
    PUT,
    reply_bytes,
    request_bytes,
)

MAX = 1000
both = pytest.mark.parametrize("dialect", DIALECTS)


@both
@pytest.mark.parametrize("key", ["k", "vllm@model name@1@0@ab", "ключ", "k" * 150])
def test_a_put_is_read(dialect: str, key: str) -> None:
    request = DIALECTS[dialect].parse(request_bytes(dialect, PUT, key, MAX, ABOUT), MAX)
    assert (request.command, request.key, request.num_bytes, request.about) == (
        CompatCommand.PUT,
        key,
        MAX,
        ABOUT,
    )


@both
def test_numbers_are_kept_whatever_they_are(dialect: str) -> None:
    about = (-1, 99, -(2**31), 2**31 - 1, 0, 7)
    assert DIALECTS[dialect].parse(request_bytes(dialect, PUT, "k", 1, about), MAX).about == about


@both
@pytest.mark.parametrize("command", [GET, EXIST, HEALTH])
@pytest.mark.parametrize("num_bytes", [-1, 0, 2**31 - 1])
def test_only_a_put_brings_a_value(dialect: str, command: int, num_bytes: int) -> None:
    assert (
        DIALECTS[dialect].parse(request_bytes(dialect, command, "k", num_bytes), MAX).num_bytes == 0
    )


@both
def test_health_needs_no_key(dialect: str) -> None:
    assert DIALECTS[dialect].parse(request_bytes(dialect, HEALTH, b"\xff"), MAX).key == ""


@both
@pytest.mark.parametrize(
    ("command", "key", "num_bytes", "reason"),
    [
        (0, "k", 0, CloseReason.COMMAND),
        (LIST, "k", 0, CloseReason.COMMAND),
        (6, "k", 0, CloseReason.COMMAND),
        (-1, "k", 0, CloseReason.COMMAND),
        (PUT, "k", 0, CloseReason.LENGTH),
        (PUT, "k", -1, CloseReason.LENGTH),
        (PUT, "k", MAX + 1, CloseReason.LENGTH),
        (PUT, "k", 2**31 - 1, CloseReason.LENGTH),
        (PUT, "", 1, CloseReason.KEY),
        (GET, "", 0, CloseReason.KEY),
        (EXIST, b"\xff\xfe", 0, CloseReason.KEY),
        (GET, "k\0", 0, CloseReason.KEY),
        (PUT, "k\n", 1, CloseReason.KEY),
    ],
)
def test_what_is_no_request_is_refused(
    dialect: str, command: int, key: str | bytes, num_bytes: int, reason: CloseReason
) -> None:
    with pytest.raises(CompatRefusedError) as refused:
        DIALECTS[dialect].parse(request_bytes(dialect, command, key, num_bytes), MAX)
    assert refused.value.reason is reason


@both
def test_replies(dialect: str) -> None:
    assert DIALECTS[dialect].found(5, ABOUT) == reply_bytes(dialect, 200, 5, ABOUT)
    assert DIALECTS[dialect].found() == reply_bytes(dialect, 200, 0, NO_VALUE)
    assert DIALECTS[dialect].missing() == reply_bytes(dialect, 400, 0, NO_VALUE)
