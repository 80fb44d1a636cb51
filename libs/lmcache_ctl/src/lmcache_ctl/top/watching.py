"""Looks at services again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from lmcache_ctl.cluster.asking import Asker
from lmcache_ctl.cluster.looking import look_at
from lmcache_ctl.cluster.services import Service
from lmcache_ctl.errors import CtlError
from lmcache_ctl.settings import CtlSettings
from lmcache_ctl.top.rates import Moment, moment

FIND_EVERY_S: Final = 5.0
"""Pods come and go; the Kubernetes API is not asked for them more often, however short the
interval.
"""


async def moments(
    settings: CtlSettings, find: Callable[[], list[Service]], interval_s: float
) -> AsyncIterator[Moment]:
    """What they do, once in each interval, without an end; the first comes after one interval.

    Args:
        settings: How they are asked.
        find: Which there are; called now, and again every few seconds. When it fails later, those
            that were known are looked at.
        interval_s: Seconds between two looks.

    Raises:
        CtlError: There is none at the beginning.
        UsageError: Token or TLS files cannot be read.
    """
    asker = Asker(settings)
    services, found_at, problem = await asyncio.to_thread(find), time.monotonic(), ""
    before, looked_at = await look_at(asker, services), time.monotonic()
    while True:
        await asyncio.sleep(max(0.0, looked_at + interval_s - time.monotonic()))
        if time.monotonic() - found_at >= FIND_EVERY_S:
            try:
                services, problem = await asyncio.to_thread(find), ""
            except CtlError as exc:
                problem = str(exc)
            found_at = time.monotonic()
        now = time.monotonic()
        after = await look_at(asker, services)
        yield moment(before, after, now - looked_at, problem)
        before, looked_at = after, now
