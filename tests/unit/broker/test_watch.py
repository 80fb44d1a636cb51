"""How often the Kubernetes API is asked for the endpoints of a service."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from lmcache_broker.discovery.watch import MAX_RETRY_S, EndpointWatch
from lmcache_broker.settings import BrokerSettings
from lmcache_core.errors import UnavailableError

from tests.fixtures.virtual_time import CLOCK

pytestmark = pytest.mark.virtual_time
LIST = json.dumps({"metadata": {"resourceVersion": "1"}, "items": []}).encode()
BOOKMARK = json.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "2"}}})


class EndingApi:
    """Ends each watch at once, as an API server does that is about to end."""

    settings = BrokerSettings(kubernetes_service="sidecars")

    def __init__(self, *events: str) -> None:
        self.body = "".join(f"{event}\n" for event in events).encode()

    @asynccontextmanager
    async def slices(self, silence_s: float, **query: str) -> AsyncIterator[AsyncIterator[bytes]]:
        async def parts() -> AsyncIterator[bytes]:
            yield self.body if "watch" in query else LIST

        yield parts()


async def passed_s(watch: Any, num_watches: int) -> float:
    begin_s = CLOCK.now_s
    while watch.num_watches < num_watches:
        await watch.follow()
    return CLOCK.now_s - begin_s


async def test_watches_that_end_without_an_event_are_repeated_ever_more_slowly() -> None:
    watch = EndpointWatch(EndingApi(), lambda seen: None)  # type: ignore[arg-type]
    assert 0 < await passed_s(watch, 3) < MAX_RETRY_S
    assert await watch.ping(), "it is followed all the same"
    assert await passed_s(watch, 20) > 5 * MAX_RETRY_S
    assert watch.num_lists == 1
    with pytest.raises(UnavailableError):
        await watch.ping()


async def test_a_watch_that_ends_after_an_event_goes_on_at_once() -> None:
    watch = EndpointWatch(EndingApi(BOOKMARK), lambda seen: None)  # type: ignore[arg-type]
    assert await passed_s(watch, 20) == 0
    assert await watch.ping() == "version 2"
