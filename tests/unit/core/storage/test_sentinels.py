"""Sentinels that are asked by several calls at once."""

from __future__ import annotations

import asyncio
from typing import Any

from lmcache_core.storage.remote.redis import SteadySentinels
from redis.exceptions import ConnectionError as LostConnectionError

MASTER = {
    "ip": "10.0.0.1",
    "port": 6379,
    "is_master": True,
    "is_sdown": False,
    "is_odown": False,
    "num-other-sentinels": 2,
}


class Sentinel:
    def __init__(self, name: str, answers: bool) -> None:
        self.name = name
        self._answers = answers

    async def sentinel_masters(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        if not self._answers:
            raise LostConnectionError(self.name)
        return {"mymaster": MASTER}


async def test_none_gets_lost_and_the_one_that_answers_is_asked_first() -> None:
    every = [Sentinel("a", False), Sentinel("b", True), Sentinel("c", True)]
    sentinels = SteadySentinels([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = list(every)
    found = await asyncio.gather(*(sentinels.discover_master("mymaster") for _ in range(3)))
    assert found == [("10.0.0.1", 6379)] * 3
    assert {one.name for one in sentinels.sentinels} == {"a", "b", "c"}
    assert sentinels.sentinels[0].name == "b"
