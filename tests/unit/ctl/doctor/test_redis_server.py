"""What of a Redis server's `INFO` is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from lmcache_ctl.doctor.findings import Level
from lmcache_ctl.doctor.redis_server import check_info

FINE: dict[str, Any] = {
    "redis_version": "7.0.15",
    "role": "master",
    "maxmemory": 1000,
    "used_memory": 10,
    "maxmemory_policy": "noeviction",
}


def levels(**info: Any) -> list[tuple[Level, str]]:
    return [
        (one.level, one.what)
        for one in check_info("here", FINE | info)
        if one.level is not Level.OK
    ]


def test_one_that_is_fine() -> None:
    assert levels() == []


@pytest.mark.parametrize(
    ("info", "level", "said"),
    [
        ({"redis_version": "6.0.16"}, Level.ERROR, "version 6.0.16"),
        ({"role": "slave"}, Level.ERROR, "it is a slave"),
        ({"maxmemory_policy": "allkeys-lru"}, Level.ERROR, "maxmemory-policy is allkeys-lru"),
        ({"maxmemory": 0}, Level.WARNING, "maxmemory is not set"),
        ({"used_memory": 950}, Level.WARNING, "95% of maxmemory"),
        ({"aof_enabled": 1}, Level.NOTE, "appendonly"),
        (
            {"rdb_last_bgsave_status": "err", "rdb_changes_since_last_save": 3},
            Level.ERROR,
            "snapshot failed",
        ),
    ],
)
def test_one_that_is_not(info: dict[str, Any], level: Level, said: str) -> None:
    [(found, what)] = levels(**info)
    assert found is level
    assert said in what
