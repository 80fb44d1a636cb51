from __future__ import annotations

import pytest
from lmcache_storage.compat.dialect import DIALECTS, CloseReason, CompatRefusedError

from tests.fixtures.compat import (
    EXIST,
    GET,
    HEALTH,
    LIST,
    PUT,
    request_bytes,
)

MAX = 1000
both = pytest.mark.parametrize("dialect", DIALECTS)


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
