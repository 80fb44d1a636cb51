"""Looks at services again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from lmcache_ctl.cluster.asking import Asker
from lmcache_ctl.cluster.looking import look_at
from lmcache_ctl.cluster.services import Service
from lmcache_ctl.settings import CtlSettings
from lmcache_ctl.top.rates import Moment, moment


async def moments(settings: CtlSettings, services: list[Service], interval_s: float) -> AsyncIterator[Moment]:
    """What they do, once in each interval, without an end; the first comes after one interval.

    Raises:
        UsageError: Token or TLS files cannot be read.
    """
    asker = Asker(settings)
    before, looked_at = await look_at(asker, services), time.monotonic()
    while True:
        await asyncio.sleep(max(0.0, looked_at + interval_s - time.monotonic()))
        now = time.monotonic()
        after = await look_at(asker, services)
        yield moment(before, after, now - looked_at)
        before, looked_at = after, now
